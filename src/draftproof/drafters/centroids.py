"""An output head that looks at a part of the vocabulary: the tokens of the centroids nearest to a state.

Shapes: M read rows, H hidden size, C centroids, S tokens of a centroid, X tokens looked at, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.drafters.context import DraftContext
from draftproof.models import cost
from draftproof.models.cost import Cost


class CentroidHead:
    """Logits of the tokens that belong to the best centroids; every other token gets 1 less than the least of them."""

    def __init__(self, ctx: DraftContext, num_centroids: int, num_chosen: int, weight_VH: Tensor) -> None:
        vocab, hidden = weight_VH.shape
        self._weight_VH = weight_VH
        self._tokens_CS = _order(ctx, num_centroids, num_chosen, vocab).view(num_centroids, -1)
        self._num_chosen = num_chosen
        self._centroids = ctx.builder.linear(
            "masked_embedding.centroids", hidden, num_centroids, out_dtype=torch.float32
        )

    def __call__(self, hidden_MH: Tensor) -> Tensor:
        """fp32 [M, V]."""
        chosen_MC = self._centroids(hidden_MH).topk(self._num_chosen, dim=-1).indices
        tokens_MX = self._tokens_CS[chosen_MC].flatten(1)
        found_MX = torch.bmm(self._weight_VH[tokens_MX].float(), hidden_MH.float()[:, :, None]).squeeze(2)
        least_M1 = found_MX.amin(dim=-1, keepdim=True) - 1.0
        return least_M1.repeat(1, len(self._weight_VH)).scatter_(1, tokens_MX, found_MX)

    def cost(self, num_rows: int) -> Cost:
        """Every row reads the weights of its own tokens."""
        elements = self._num_chosen * self._tokens_CS.shape[1] * self._weight_VH.shape[1]
        each = cost.products(elements, 1, self._weight_VH.element_size())
        return cost.linear(self._centroids, num_rows) + each * num_rows


def _order(ctx: DraftContext, num_centroids: int, num_chosen: int, vocab: int) -> Tensor:
    """int64 [V]: the tokens of the first centroid, of the second, ..."""
    assert ctx.checkpoint is not None
    where = ctx.checkpoint.where
    if vocab % num_centroids or not 1 <= num_chosen <= num_centroids:
        raise ValueError(
            f"{where}: num_centroids={num_centroids}, centroid_intermediate_top_k={num_chosen}: the first must "
            f"divide vocab_size={vocab}, the second lie between 1 and the first"
        )
    order_V = ctx.checkpoint.weights.get("masked_embedding.token_ordering", (vocab,), "ids").long()
    if not torch.equal(order_V.sort().values, torch.arange(vocab)):
        raise ValueError(
            f"{where}: masked_embedding.token_ordering must name each of {vocab} tokens once; download the files again"
        )
    return order_V.to(ctx.device)
