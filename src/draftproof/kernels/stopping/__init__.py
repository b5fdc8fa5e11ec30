"""When a drafter that makes one draft after the other stops: the interface and its versions.

A drafter that is sure of a draft is mostly right, and mostly as sure of the next one. How often drafts of which
confidence are right is learned from what became of earlier proposals, verified or not.

Shapes: R requests, V columns of logits, S slots, L positions.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftproof.kernels.stopping.compiled import StoppingCompiled
from draftproof.kernels.stopping.record import StopRecord
from draftproof.kernels.stopping.reference import stopping_torch
from draftproof.kernels.versions import Versions


class Stopping(Protocol):
    def __call__(
        self,
        step: int,  # the number of drafts before this one
        logits_RV: Tensor,  # fp32: that the draft was drawn from
        drawn_R: Tensor,  # int64: the draft
        slots_R: Tensor,  # int64, each at most once
        k_R: Tensor,  # int64: drafts wanted
        tokens_SL: Tensor,  # int32, tokens of every slot
        length_S: Tensor,  # int64: number of known tokens
        price: Tensor,  # fp32 [4]: see `DraftRuntime.price`
        record: StopRecord,
        count_R: Tensor,  # int64: overwritten with the number of drafts so far
    ) -> None:
        """Count draft `step` of each request whose proposal has not ended, and decide which proposals go on, and
        whether there is a next draft at all (`record.is_over_1`). The first one compares each slot's last proposal with
        the tokens known since.

        A proposal goes on if its next draft is expected to bring the price of a row; there is a next draft if those of
        all proposals together bring more by the price of a draft. Expected is the chance that all drafts so far are
        right, and that the next one is as likely as the last. Example: after two drafts with chances of 0.9 and 0.5 a
        third brings 0.9 * 0.5 * 0.5 = 0.225 tokens. With prices of 0 each draft pays and is made, as in a profile,
        whose requests want none; and none is compared or kept.
        """
        ...


STOPPING: Versions[Stopping] = Versions(stopping_torch, compiled=StoppingCompiled, triton=None)
