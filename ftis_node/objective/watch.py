"""A filter that never fires protects from nothing, and one that fires on most negatives leaves a peer little to say.

The paper (arXiv 2605.22537, section 4.5) finds the best g by trial; a node that runs unattended has to be told.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ftis_node.step_report import OWN

FORGET_AFTER = 100  # observations without the peer

ADVICE = {
    "none": "dropped none of {peer}'s negative samples: it is not needed there, unless the training gets "
    "worse; then try a lower threshold.",
    "most": "dropped more than half of {peer}'s negative samples: its policy is far from this one's, "
    "which is harmless and passes while one of the two is still learning; else the threshold is too low.",
}


@dataclass
class _Streak:
    """The filter's last state for one peer: for how many steps in a row, when the peer was last seen, and the last
    report.
    """

    verdict: str | None = None
    steps: int = 0
    seen: int = 0
    told: str | None = None


class FilterWatch:
    """Tells of peers on whose negative samples the filter fires never, or mostly, for `steps` steps in a row."""

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps
        self._now = 0
        self._streaks: dict[str, _Streak] = {}

    def observe(self, sources: Mapping[str, Mapping[str, float]]) -> list[str]:
        """Take `Diagnostics.summary().sources` of a step; return one sentence for each peer with something to report.

        A step in which a peer had no negatives neither ends nor lengthens its streak. The last report of each peer is
        not told again, also if it ceased meanwhile: a streak that comes and goes fills no log. A peer not seen for
        `FORGET_AFTER` observations is forgotten.
        """
        self._now += 1
        told = []
        for peer, figures in sources.items():
            if peer == OWN:
                continue
            streak = self._streaks.setdefault(peer, _Streak())
            streak.seen = self._now
            if not figures["negatives"]:
                continue
            verdict = _verdict(figures["filtered"] / figures["negatives"])
            if verdict != streak.verdict:
                streak.steps = 0
            streak.steps += 1
            streak.verdict = verdict
            if verdict not in (None, streak.told) and streak.steps == self.steps:
                streak.told = verdict
                told.append(f"For {self.steps} steps the filter has {ADVICE[verdict].format(peer=peer)}")
        for peer, streak in list(self._streaks.items()):
            if self._now - streak.seen >= FORGET_AFTER:
                del self._streaks[peer]
        return told


def _verdict(dropped: float) -> str | None:
    """The key in `ADVICE` for the share of the negatives that was dropped, in [0, 1]; None: there is nothing to say."""
    if dropped == 0:
        return "none"
    if dropped > 0.5:
        return "most"
    return None
