"""Word problems of two steps for three owners, whose rows differ in what they ask for; `public` has other rows of each
kind. They are told in the words of the template `tags-example`, for models that read.
"""

import functools
import random
from collections.abc import Callable

from ftis_node.tasks import Task, make_task

_ROWS = 300
_HELD_OUT = 150
_NAMES = ("Ann", "Ben", "Carla", "Dan", "Eva", "Farid", "Gita", "Hugo")
_THINGS = ("apples", "pens", "books", "coins", "stamps", "eggs", "shells", "cards")

Row = tuple[str, int]


def _shop(rng: random.Random) -> Row:
    """Draw a question and its answer: a product, and what is paid or comes back."""
    name = rng.choice(_NAMES)
    count = rng.randint(3, 12)
    price = rng.randint(3, 12)
    rest = rng.randint(2, 40)
    paid = count * price + rest
    bought = f"{name} buys {count} {rng.choice(_THINGS)} for {price} dollars each"
    if rng.random() < 0.5:
        return f"{bought} and a bag for {rest} dollars. How many dollars does {name} pay?", paid
    return f"{bought} and gives {paid} dollars. How many dollars does {name} get back?", rest


def _share(rng: random.Random) -> Row:
    """Draw a question and its answer: a sum or a difference, and a quotient."""
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    friends = rng.randint(2, 9)
    each = rng.randint(3, 15)
    part = rng.randint(2, friends * each - 1)
    shared = f"share all of them equally among {friends} friends. How many {thing} does each friend get?"
    if rng.random() < 0.5:
        rest = friends * each - part
        return f"{name} has {part} {thing} and {other} has {rest} {thing}. They {shared}", each
    there = friends * each + part
    return f"{name} and {other} have {there} {thing}. They lose {part} {thing} and {shared}", each


def _compare(rng: random.Random) -> Row:
    """Draw a question and its answer: a multiple, and a sum or a difference."""
    first, second, third = rng.sample(_NAMES, 3)
    thing = rng.choice(_THINGS)
    count = rng.randint(5, 30)
    times = rng.randint(2, 6)
    less = rng.randint(2, count)
    told = f"{first} has {count} {thing}. {second} has {times} times as many. "
    if rng.random() < 0.5:
        return f"{told}How many {thing} do they have together?", count * times + count
    told += f"{third} has {less} {thing} fewer than {second}. How many {thing} does {third} have?"
    return told, count * times - less


def shop() -> Task:
    """The first owner's rows. Lab files name this and the other three as tasks, `ftis_node.lab.owners:shop`."""
    return _task("shop", _shop)


def share() -> Task:
    """The second owner's rows."""
    return _task("share", _share)


def compare() -> Task:
    """The third owner's rows."""
    return _task("compare", _compare)


def public() -> Task:
    """Rows of all three kinds, none of which an owner has."""
    return _task("public", _shop, _share, _compare)


@functools.cache
def _task(name: str, *kinds: Callable[[random.Random], Row]) -> Task:
    """A task of 300 different rows of these kinds in turn, and 150 held out, drawn from the name: the same everywhere.
    With several kinds it has no row of an owner's."""
    rng = random.Random(f"owners/{name}")
    private = set()
    if len(kinds) > 1:
        for task in (shop(), share(), compare()):
            private |= {row.question for row in (*task.train, *task.held_out)}
    rows: dict[str, int] = {}
    while len(rows) < _ROWS + _HELD_OUT:
        question, answer = kinds[len(rows) % len(kinds)](rng)
        if question not in private:
            rows[question] = answer
    drawn = list(rows.items())
    return make_task(
        drawn[_HELD_OUT:],
        held_out=drawn[:_HELD_OUT],
        template="tags-example",
        prompt_tokens=256,
        completion_tokens=96,
    )
