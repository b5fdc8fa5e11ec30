"""How much longer steps take than in the profile, estimated from the steps that run.

A step's time is modelled as the profile's seconds, times the machine's pace, times a correction for its kind of step,
times noise; for steps with drafts also times a power of their rows per request, since the profile may have few rows
right and many wrong. The pace is common to all steps and changes from step to step: other programs run, clocks change.
A correction is an error of the profile and hardly changes. The logarithms of all are estimated jointly by a Kalman
filter that also estimates the noise, so a step of one kind improves the prediction for other kinds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

# Standard deviations of logarithms, so roughly relative errors.
UNKNOWN_PACE = 0.2  # prior of the machine's pace
DRIFT = 0.02  # change of the pace from step to step
UNKNOWN_KIND = 0.2  # prior of a kind's correction
UNKNOWN_GROWTH = 0.03  # prior of the correction for each doubling of the rows
FIRST_NOISE, LEAST_NOISE = 0.1, 0.02  # noise of a step: at the start, and at least
NOISE_RATE = 0.05  # weight of a new step in the noise estimate
SURPRISE = 2.0  # standard deviations at which a step's deviation is clipped
REMEMBERED = 0.99  # decay of a correction that waits, per step: so that what seemed slow is tried again

GROWTH = -1  # the kind under which the correction for each doubling of the rows is kept


@dataclass(slots=True)
class Pace:
    """The filter's state: means of the logarithms of the pace (first) and of the corrections, their covariances, and
    the variance of a step's noise. Kind 0 is the baseline and has no correction.

    `doublings`, of a step: the logarithm to base 2 of its rows per request."""

    means: list[float] = field(default_factory=lambda: [0.0])
    covariances: list[list[float]] = field(default_factory=lambda: [[UNKNOWN_PACE**2]])
    noise: float = FIRST_NOISE**2
    num_drafting: int = 0  # steps of other kinds than the baseline
    _places: dict[int, int] = field(default_factory=dict)
    _unknown: list[float] = field(default_factory=lambda: [UNKNOWN_PACE])  # standard deviations of the priors

    def at(self, kind: int, doublings: float = 0.0) -> float:
        """The logarithm of the expected time over the profile's, for steps of this kind."""
        found, places = self.means[0], self._places
        if kind in places:
            found += self.means[places[kind]]
        return found + doublings * self.growth if doublings else found

    @property
    def growth(self) -> float:
        """The logarithm of the correction for each doubling of the rows."""
        return self.means[self._places[GROWTH]] if GROWTH in self._places else 0.0

    def successor(self) -> Pace:
        """The prior for another group of steps on the same machine."""
        return Pace([self.means[0]], [[self.covariances[0][0] + UNKNOWN_KIND**2]], self.noise)

    def observe(
        self,
        kind: int,
        found: float,
        doublings: float = 0.0,
        *,
        is_alternative: bool = True,
        unknown: float = UNKNOWN_KIND,
    ) -> None:
        """A step of this kind took exp(`found`) times as long as the profile says. `is_alternative`: kinds that are not
        met may not be met because of their corrections, so these decay. Else they are kept: a kind that comes by
        chance, now and then, would seem slow each time, and with it the machine. `unknown`: standard deviation of the
        prior of the kind's correction."""
        self.num_drafting += kind != 0
        weights = self._weights(kind, doublings, unknown)
        self.covariances[0][0] += DRIFT**2
        if is_alternative:
            self._wait(weights)
        means, covariances = self.means, self.covariances
        with_found = [sum(map(mul, weights, row)) for row in covariances]
        explained = sum(map(mul, weights, with_found))
        variance = explained + self.noise
        most = SURPRISE * math.sqrt(variance)
        surprise = min(most, max(-most, found - sum(map(mul, weights, means))))
        for i, shared in enumerate(with_found):
            gain = shared / variance
            means[i] += gain * surprise
            covariances[i] = [c - gain * w for c, w in zip(covariances[i], with_found, strict=True)]
        unexplained = max(LEAST_NOISE**2, surprise**2 - explained)
        self.noise += NOISE_RATE * (unexplained - self.noise)

    def _weights(self, kind: int, doublings: float, unknown: float) -> list[float]:
        """How much of each number of the state is in the logarithm of a step's time."""
        correction = self._place(kind, unknown) if kind else 0
        growth = self._place(GROWTH, UNKNOWN_GROWTH) if doublings else 0
        weights = [0.0] * len(self.means)
        weights[growth] = doublings
        weights[correction] = weights[0] = 1.0
        return weights

    def _place(self, kind: int, unknown: float) -> int:
        """Place of a correction in the state. `unknown`: standard deviation of its prior."""
        place = self._places.get(kind)
        if place is None:
            place = self._places[kind] = len(self.means)
            for row in self.covariances:
                row.append(0.0)
            self.means.append(0.0)
            self._unknown.append(unknown)
            self.covariances.append([0.0] * place + [unknown**2])
        return place

    def _wait(self, weights: Sequence[float]) -> None:
        """Have corrections decay that a step with these `weights` lacks."""
        for place in self._places.values():
            if weights[place]:
                continue
            self.means[place] *= REMEMBERED
            for row in self.covariances:
                row[place] *= REMEMBERED
            self.covariances[place] = [REMEMBERED * c for c in self.covariances[place]]
            self.covariances[place][place] += (1.0 - REMEMBERED**2) * self._unknown[place] ** 2
