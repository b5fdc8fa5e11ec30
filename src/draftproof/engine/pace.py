"""How much longer steps take than in the profile, estimated from the steps that run.

A step's time is modelled as the profile's seconds, times the machine's pace, times a correction for its kind of step,
times noise. The pace is common to all steps and changes from step to step: other programs run, clocks change. A
correction is an error of the profile and hardly changes. The logarithms of both are estimated jointly by a Kalman
filter that also estimates the noise, so a step of one kind improves the prediction for other kinds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Standard deviations of logarithms, so roughly relative errors.
UNKNOWN_PACE = 0.12  # prior of the machine's pace
DRIFT = 0.02  # change of the pace from step to step
UNKNOWN_KIND = 0.2  # prior of a kind's correction
FIRST_NOISE, LEAST_NOISE = 0.1, 0.02  # noise of a step: at the start, and at least
NOISE_RATE = 0.05  # weight of a new step in the noise estimate
SURPRISE = 2.0  # standard deviations at which a step's deviation is clipped
REMEMBERED = 0.99  # decay of a correction per step of another kind, so that what seemed slow is tried again


@dataclass(slots=True)
class Pace:
    """The filter's state: means of the logarithms of the pace (first) and of the corrections, their covariances, and
    the variance of a step's noise. Kind 0 is the baseline and has no correction."""

    means: list[float] = field(default_factory=lambda: [0.0])
    covariances: list[list[float]] = field(default_factory=lambda: [[UNKNOWN_PACE**2]])
    noise: float = FIRST_NOISE**2
    _places: dict[int, int] = field(default_factory=dict)

    def at(self, kind: int) -> float:
        """The logarithm of the expected time over the profile's, for steps of this kind."""
        place = self._places.get(kind)
        return self.means[0] if place is None else self.means[0] + self.means[place]

    def successor(self) -> Pace:
        """The prior for another group of steps on the same machine."""
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
        """The prediction step: the pace drifts, and corrections of other kinds decay."""
        self.covariances[0][0] += DRIFT**2
        for other in range(1, len(self.means)):
            if other == place:
                continue
            self.means[other] *= REMEMBERED
            for row in self.covariances:
                row[other] *= REMEMBERED
            self.covariances[other] = [REMEMBERED * c for c in self.covariances[other]]
            self.covariances[other][other] += (1.0 - REMEMBERED**2) * UNKNOWN_KIND**2
