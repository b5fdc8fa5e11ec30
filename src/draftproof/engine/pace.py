"""How much longer steps take than the profile says, learnt from the steps that are run.

What a step takes is the profile's seconds, times the machine's pace, times a correction for steps of its kind, times
noise. The pace is of all steps alike and changes from step to step: other programs run, clocks change. A correction is
a fault of the profile and hardly changes. Logarithms of both are estimated together, by a Kalman filter that finds out
for itself how noisy steps are: a busy machine slows plain and drafting steps alike, and a step of one kind says what
the next of another will take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Standard deviations of logarithms, so about parts of one.
UNKNOWN_PACE = 0.2  # of a machine's pace before the first step
DRIFT = 0.02  # of its change from step to step
UNKNOWN_KIND = 0.15  # of a kind's correction
FIRST_NOISE, LEAST_NOISE = 0.1, 0.02  # of a step: at the start, and on the quietest machine
NOISE_RATE = 0.05  # weight of a step in the noise
SURPRISE = 2.0  # standard deviations, beyond which a surprise says no more
REMEMBERED = 0.98  # what a step of another kind leaves of a correction: what seemed slow is tried again


@dataclass(slots=True)
class Pace:
    """Logarithms of the pace (first) and of the corrections, their covariances, and the variance of a step's noise.
    Kind 0 has no correction: the others are compared with it."""

    means: list[float] = field(default_factory=lambda: [0.0])
    covariances: list[list[float]] = field(default_factory=lambda: [[UNKNOWN_PACE**2]])
    noise: float = FIRST_NOISE**2
    _places: dict[int, int] = field(default_factory=dict)

    def at(self, kind: int) -> float:
        """The logarithm of times as long as the profile says, for steps of this kind."""
        place = self._places.get(kind)
        return self.means[0] if place is None else self.means[0] + self.means[place]

    def successor(self) -> Pace:
        """What is expected of other steps on the same machine."""
        return Pace([self.means[0]], [[self.covariances[0][0] + UNKNOWN_KIND**2]], self.noise)

    def observe(self, kind: int, found: float) -> None:
        """A step of this kind took exp(`found`) times as long as the profile says."""
        place = self._place(kind) if kind else 0
        self._wait(place)
        means, covariances = self.means, self.covariances
        common, own = covariances[0], covariances[place]
        with_found = [a + b for a, b in zip(common, own, strict=True)] if place else common
        explained = with_found[0] + with_found[place] if place else with_found[0]
        variance = explained + self.noise
        most = SURPRISE * math.sqrt(variance)
        surprise = min(most, max(-most, found - self.at(kind)))
        for i, gain in enumerate([c / variance for c in with_found]):
            means[i] += gain * surprise
            covariances[i] = [c - gain * w for c, w in zip(covariances[i], with_found, strict=True)]
        unexplained = max(LEAST_NOISE**2, surprise**2 - explained)
        self.noise += NOISE_RATE * (unexplained - self.noise)

    def _place(self, kind: int) -> int:
        place = self._places.get(kind)
        if place is None:
            place = self._places[kind] = len(self.means)
            for row in self.covariances:
                row.append(0.0)
            self.means.append(0.0)
            self.covariances.append([0.0] * place + [UNKNOWN_KIND**2])
        return place

    def _wait(self, place: int) -> None:
        """What a step's time does: the pace drifts, and corrections that are not of this step fade."""
        self.covariances[0][0] += DRIFT**2
        for other in range(1, len(self.means)):
            if other == place:
                continue
            self.means[other] *= REMEMBERED
            for row in self.covariances:
                row[other] *= REMEMBERED
            self.covariances[other] = [REMEMBERED * c for c in self.covariances[other]]
            self.covariances[other][other] += (1.0 - REMEMBERED**2) * UNKNOWN_KIND**2
