"""A node's condition: one word, one sentence, and advice if a person can do something about it; and telling it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ftis_node.observe.answers import State
from ftis_node.step_report import ClockDifference
from ftis_node.swarm.membership import Reachability
from ftis_node.swarm.roster import NO_MEMBER
from ftis_node.text import counted, duration, rounded

logger = logging.getLogger(__name__)

FAULT_SECONDS = 600.0  # a node is degraded for so long after a failure of its compute process
IDLE_STEPS = 10
ENOUGH_GROUPS = 12  # own groups whose rewards say something
LITTLE_SIGNAL = 0.2
SOLVED = 0.95  # pass@1 from which steps that change nothing are a success
DOWN_SECONDS = 10.0
CLOCK_SHOWN = 300.0  # difference to the peers' clocks from which the node reports it
CLOCK_FAR = 2 * 3600.0  # difference from which it is degraded: at three hours peers refuse each other's announcements
ENOUGH_CLOCKS = 3  # peers whose median shows that this node's clock is the wrong one


@dataclass(frozen=True)
class Condition:
    """state; reason: sentences for a person; advice: what a person should do, empty if nothing."""

    state: State
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class Signs:
    """The inputs of a condition.

    peers           in the view; sought: number that the first step waits for, 0 if it does not wait
    network_down    seconds since p2pd ended
    free_bytes      on the home's disk; checkpoint_bytes: of the next checkpoint, as far as known
    faults          recent failures of the compute process, the latest last
    bad_steps       in a row without a finite gradient
    idle_steps      in a row that changed nothing
    signals         own groups of late, and how many of them had rewards that differ: only from these a model learns
    pass_at_1       latest, None before the first evaluation
    warning         what the latest evaluation shows to be wrong, in sentences; empty if nothing
    stalled         seconds since the compute process's oldest unanswered request if that is too long, else 0
    other_protocol  peers that this node has met and that speak another version of the protocol
    own_refused     whether an own group of the latest round was unsound
    clock           difference between this node's clock and its peers', None if no peer sent its time
    replayed        announcements refused because of their time, since the start
    shut_out        why the node is no member of its private run any more, empty if it is
    skipped         peers of which no address is dialled, and why, each in a phrase
    copied          whether another node signs with this node's key
    home            the flag by which a command names this node: `Home.flag`
    """

    peers: int = 0
    sought: int = 0
    reachability: Reachability = Reachability.DIRECT
    network_down: float = 0.0
    free_bytes: int | None = None
    checkpoint_bytes: int = 0
    faults: tuple[str, ...] = ()
    bad_steps: int = 0
    idle_steps: int = 0
    signals: tuple[int, int] = (0, 0)
    pass_at_1: float | None = None
    warning: str = ""
    stalled: float = 0.0
    other_protocol: int = 0
    own_refused: bool = False
    clock: ClockDifference | None = None
    replayed: int = 0
    shut_out: str = ""
    skipped: Sequence[str] = ()
    home: str = ""
    copied: bool = False


def condition(signs: Signs) -> Condition:
    """The condition of a node that trains: the first fault that the signs show, else its connection to peers.

    A pure function. States are a fixed set that metrics and scripts read; reason and advice are for people.
    """
    for reason, advice in (*_machine_troubles(signs), *_training_troubles(signs)):
        return Condition(State.DEGRADED, reason, advice)
    if signs.shut_out:
        reason = f"This node is no member of its private run: {signs.shut_out}. It trains alone."
        return Condition(State.ALONE, reason, NO_MEMBER)
    if signs.sought > signs.peers:
        return Condition(State.JOINING, f"Waiting for {counted(signs.sought, 'peer')} before the first step.")
    if not signs.peers and signs.other_protocol:
        speak = f"{counted(signs.other_protocol, 'peer')} that cannot be worked with: another version of the protocol"
        return Condition(State.ALONE, f"No peers but {speak}. Training alone.", _UPGRADE + signs.home + "` says which.")
    more = _skipped(signs) + _little_signal(signs) + signs.warning
    if not signs.peers:
        return Condition(State.ALONE, f"No peers: training alone, and looking for some.{more}", _ALONE)
    state, how = _REACHED[signs.reachability]
    reason = f"Training with {counted(signs.peers, 'peer')}{how}.{more}"
    if _solved(signs):
        reason += f" The task is solved: pass@1 is {signs.pass_at_1:.2f}, and all completions of a prompt are alike."
    if signs.clock is not None and abs(signs.clock.behind) >= CLOCK_SHOWN:
        return Condition(state, f"{reason} {_whose(signs.clock)}.", SET_CLOCK)
    return Condition(state, reason)


_ALONE = (
    "`ftis-node invite` prints a line for others. If there should be some already: `ftis-node doctor net --peers "
    "ADDRESS` says whether they can be reached."
)
_UPGRADE = "Upgrade ftis-node where it is older: `ftis-node peers"
_OUT = ", all over connections that this node opened: nobody can dial it"
_REACHED = {
    Reachability.DIRECT: (State.ONLINE, ""),
    Reachability.RELAYED: (State.RELAYED, "; others reach this node through relays"),
    Reachability.OUTBOUND_ONLY: (State.OUTBOUND_ONLY, _OUT),
}
SET_CLOCK = "Compare with a clock that is right: `date -u`. If this machine's is wrong: `timedatectl set-ntp true`."


def _skipped(signs: Signs) -> str:
    """A sentence about the first peer of which no address is dialled, and how many more there are; "" without any. As
    all sentences that follow another here, it begins with a space."""
    if not signs.skipped:
        return ""
    others = ""
    if len(signs.skipped) > 1:
        others = f" And {len(signs.skipped) - 1} more: `ftis-node peers{signs.home}`."
    return f" {signs.skipped[0]}.{others}"


def _little_signal(signs: Signs) -> str:
    """A sentence where a model learns from few of its own groups, and a command that says why; else nothing."""
    groups, with_signal = signs.signals
    solved = signs.pass_at_1 is not None and signs.pass_at_1 >= SOLVED
    if groups < ENOUGH_GROUPS or with_signal >= LITTLE_SIGNAL * groups or solved:
        return ""
    return (
        f" Only {with_signal} of the latest {groups} own groups had rewards that differ, and the others teach nothing: "
        "`ftis-node task check TASK --model MODEL` says what to change."
    )


def _whose(clock: ClockDifference) -> str:
    """A phrase, without a full stop, that says whose clock is wrong, as far as known, and by how much."""
    far = f"{duration(abs(clock.behind))} {'behind' if clock.behind > 0 else 'ahead of'}"
    if clock.peers >= ENOUGH_CLOCKS:
        return f"This node's clock is {far} those of its {clock.peers} peers"
    return f"This node's clock is {far} that of {counted(clock.peers, 'peer')}: it or theirs is wrong"


def _machine_troubles(signs: Signs) -> Iterator[tuple[str, str]]:
    """Reason and advice of what is wrong with processes, a copy of the home, clock and disk, the worst first."""
    if signs.stalled:
        yield (
            f"The compute process has owed an answer for {signs.stalled:.0f} s.",
            "Restart the node: it goes on from its checkpoint.",
        )
    if signs.network_down >= DOWN_SECONDS:
        yield (
            f"The network daemon p2pd has not answered for {signs.network_down:.0f} s; "
            "the node trains alone meanwhile.",
            "It is started again and again; if that does not help, look into node.log for what it says.",
        )
    if signs.copied:
        yield (
            "Another node uses a copy of this home: its key has signed announcements that this node did not make. "
            "Peers ban a key whose announcements contradict each other.",
            "End one of the two, and restart the other. If its peers have banned the key by then: `ftis-node export`, "
            "and `join` with --model and a new --home.",
        )
    if signs.clock is not None and abs(signs.clock.behind) >= CLOCK_FAR:
        refused = ""
        if signs.replayed:
            refused = f"; {counted(signs.replayed, 'announcement')} refused so far"
        far = f"{_whose(signs.clock)}. From three hours on nodes refuse one another's announcements{refused}."
        yield far, SET_CLOCK
    if signs.free_bytes is not None and signs.free_bytes < signs.checkpoint_bytes:
        yield (
            f"The disk of the home has {rounded(signs.free_bytes)} left, and the next checkpoint takes "
            f"{rounded(signs.checkpoint_bytes)}.",
            "Make room on it; the node ends when a checkpoint cannot be written, and goes on from the one before.",
        )
    if signs.faults:
        yield (
            f"The compute process failed {counted(len(signs.faults), 'time')} in the last ten minutes and was started "
            f"again: {signs.faults[-1]}.",
            "If it is out of memory, give it less to do: --vram, or --set micro_batch_tokens=…; "
            "else look into node.log.",
        )


def _training_troubles(signs: Signs) -> Iterator[tuple[str, str]]:
    """Reason and advice of what is wrong with steps and own groups, the worst first."""
    if signs.bad_steps:
        yield (
            f"The latest {counted(signs.bad_steps, 'step')} had no finite gradient and changed nothing.",
            "If that goes on, the node returns to an older checkpoint; a smaller learning_rate helps.",
        )
    if signs.idle_steps >= IDLE_STEPS and not _solved(signs):
        yield (
            f"The latest {signs.idle_steps} steps changed nothing: "
            "all completions of every prompt got the same reward.",
            "The task is too hard or too easy for this model: look at its completions, and try another model or task.",
        )
    if signs.own_refused:
        yield (
            "Groups that this node generated are unsound and were not sent.",
            f"Its model may have diverged: `ftis-node eval{signs.home}` tells; node.log has the reason.",
        )


def _solved(signs: Signs) -> bool:
    """Whether steps change nothing because the model can do the task; before an evaluation: no."""
    return signs.idle_steps >= IDLE_STEPS and signs.pass_at_1 is not None and signs.pass_at_1 >= SOLVED


# --- telling a person -------------------------------------------------------------------------------------------------


class Telling:
    """A node's condition: what `set_apart` set, until `trains` is called; from then on what the signs say.

    It begins as LOADING. The signs (`Signs`) are read anew for each question.
    """

    def __init__(self, of_training: Callable[[], Condition], stops: Callable[[], bool]) -> None:
        """
        Args:
            of_training: returns the condition of a node that trains.
            stops: returns whether the node was asked to stop; then no other condition is set.
        """
        self._of_training = of_training
        self._stops = stops
        self._apart: Condition | None = Condition(State.LOADING, "The node is starting.")
        self._logged = (State.LOADING, "")  # the latest state and advice in the log

    def condition(self) -> Condition:
        """The node's present condition."""
        if self._apart is not None:
            return self._apart
        return self._of_training()

    def trains(self) -> None:
        """From now on the condition follows from the signs, until the next `set_apart`."""
        self._apart = None

    def set_apart(self, state: State, reason: str, advice: str = "") -> None:
        """Set the condition of a node that does not train, and log it. Once it was asked to stop, only STOPPING counts:
        others are ignored, and not logged."""
        if not self._stops() or state is State.STOPPING:
            self._apart = Condition(state, reason, advice)
            self._log(self._apart)

    def note(self) -> None:
        """Log the condition if its state or advice changed since the last line; called before each step, and while the
        first one waits for peers. A reason alone is no change, for it has figures in it."""
        now = self.condition()
        if (now.state, now.advice) != self._logged:
            self._log(now)

    def _log(self, now: Condition) -> None:
        """Log a condition, and remember it as the latest in the log."""
        logger.info("%s: %s", now.state, f"{now.reason} {now.advice}".rstrip())
        self._logged = (now.state, now.advice)
