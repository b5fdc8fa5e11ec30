"""Settings of the training; the defaults are those that `smollm2-eagle3` was trained with."""

from __future__ import annotations

from dataclasses import dataclass

from draftproof.schema import check_number, check_whole, documented


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the target answers, and how the head is trained."""

    max_prompt_tokens: int = documented(384, "Longer prompts are left out.")
    max_tokens: int = documented(256, "Longest answer of the target.")
    answers_at_once: int = documented(3072, "Answers decoded side by side.")
    answer_seconds: float = documented(130.0, "Answers end after so long; what there is then is balanced.")
    num_drafts: int = documented(5, "Drafts that the head is trained for.")
    max_seconds: float = documented(323.0, "Seconds of training in all; the learning rate falls over them.")
    tokens_per_step: int = documented(16384, "Tokens of a step, padding included.")
    learning_rate: float = documented(2e-3, "Highest learning rate.")
    flat_share: float = documented(0.2, "Share of the seconds before the learning rate begins to fall.")
    loss_decay: float = documented(0.85, "Weight of a draft's loss, as a share of the draft's before it.")
    prompt_weight: float = documented(0.25, "Weight of a prompt's token; an answer's token weighs 1.")
    state_noise: float = documented(
        0.05, "Noise on the states that the head reads, as a share of their size."
    )
    weight_decay: float = documented(0.05, "Weight decay of matrices.")
    show_every: float = documented(10.0, "Seconds from one line of the log to the next.")
    save_every: float = documented(40.0, "Seconds from one checkpoint, with its check, to the next.")
    seed: int = documented(0, "Seed of temperatures, samples, noise and the order of texts.")

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_tokens", "answers_at_once", "num_drafts", "tokens_per_step"):
            check_whole(name, getattr(self, name), 1)
        for name in ("answer_seconds", "max_seconds", "learning_rate", "loss_decay"):
            check_number(name, getattr(self, name), above=0)
        for name in ("prompt_weight", "state_noise", "weight_decay", "show_every", "save_every"):
            check_number(name, getattr(self, name))
        if not 0 <= self.flat_share < 1:
            raise ValueError(f"flat_share={self.flat_share}: must be at least 0 and less than 1")
        check_whole("seed", self.seed, 0)

    @property
    def num_positions(self) -> int:
        """Number of positions used: a padded text and the drafts after it."""
        return self.max_prompt_tokens + self.max_tokens + self.num_drafts + 64
