"""Episodes of several answers: how they grow, what stands between answers, and that nobody's word is taken for them."""

from dataclasses import replace

import numpy as np
import pytest

from ftis_node.config.run import check_fit, run_for
from ftis_node.draw import draw
from ftis_node.errors import UsageError
from ftis_node.evaluate.episodes import Episodes
from ftis_node.evaluate.judging import judge
from ftis_node.packet import Completion, Group, decode, prompt_digests
from ftis_node.policy.generate.turns import go_on
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.swarm.admission import AdmissionContext, admit
from ftis_node.tasks import Example, Replay, Score, Scorer
from ftis_node.tasks.arithmetic import arithmetic
from ftis_node.tokenizer.chat import Frame, chat_of, chat_with, frame_of
from ftis_node.worker import engine as engines
from ftis_node.worker.engine import Engine
from ftis_node.worker.formats import packets_of
from ftis_node.worker.messages import ReadableGroup
from tests.support.small_models import arithmetic_settings, batch_of, tiny_tokenizer
from tests.support.swarm import identity, make_run
from tests.support.tokenizers import CHATML, speaker

TURNS = 3


class Hints(Scorer):
    """An environment that says + after an answer with the gold in it and - after others; three answers, or one =."""

    def __init__(self):
        self.played = 0

    def __call__(self, text, answer):
        raise AssertionError("an episode is not judged as one text")

    def replay(self, answers, gold):
        self.played += 1
        messages = []
        for count, answer in enumerate(answers, 1):
            if count == TURNS or answer == "=":
                over = count == len(answers)
                return Replay(tuple(messages), over, float(gold in answer) if over else 0.0)
            messages.append("+" if gold in answer else "-")
        return Replay(tuple(messages), False, 0.0)


def task(environment=None):
    changes = {"turns": TURNS, "completion_tokens": 24, "reward": "code:" + "0" * 40}
    return replace(arithmetic(), scorer=environment or Hints(), **changes)


# --- how they grow ----------------------------------------------------------------------------------------------------


def answer(*ids, finished=True):
    claims = np.full(len(ids), -0.5, np.float32)
    return Completion(np.array(ids, np.uint32), claims, finished)


def grown(first, answers=(), said=()):
    """The episode that grows from these answers, and the caps that they were asked for with."""
    asked = []
    heard = []
    answers = iter(answers)
    said = iter(said)
    sampled = len(first)

    def answering(contexts, places, most):
        nonlocal sampled
        assert places == [(0, sampled)], "in its own random numbers"
        asked.append((list(contexts[0]), most))
        answer = next(answers)
        sampled += len(answer)
        return [answer]

    def following(number, episode):
        heard.append(episode.token_ids.tolist())
        return next(said, [])

    ((made,),) = go_on(
        [[7, 7]],
        [[first]],
        answering=answering,
        following=following,
        turns=3,
        cap=20,
    )
    return made, asked, heard


def test_what_is_said_stands_between_answers_and_has_no_logprob():
    made, asked, heard = grown(answer(1, 9), [answer(2, 9), answer(3, 9)], [[5, 6], [5]])
    assert made.token_ids.tolist() == [1, 9, 5, 6, 2, 9, 5, 3, 9]
    assert np.flatnonzero(made.given).tolist() == [2, 3, 6]
    assert made.finished
    assert len(made.logprobs) == made.sampled == 6
    first, second = asked
    assert first == ([7, 7, 1, 9, 5, 6], 16)
    assert second == ([7, 7, 1, 9, 5, 6, 2, 9, 5], 13)
    assert heard == [[1, 9], [1, 9, 5, 6, 2, 9]], "after the last turn nobody is asked"


def test_an_episode_of_one_answer_is_a_completion_like_any_other():
    made, asked, _ = grown(answer(1, 9))
    assert made.given is None
    assert made.token_ids.tolist() == [1, 9]
    assert not asked
    cut, asked, heard = grown(answer(*[1] * 20, finished=False))
    assert not cut.finished
    assert asked == heard == []


def test_an_episode_without_room_for_what_is_said_and_an_answer_ends_before_it():
    made, asked, _ = grown(answer(1, 9), said=[[5] * 18])
    assert made.token_ids.tolist() == [1, 9]
    assert made.finished
    assert not asked
    made, [(_, cap)], _ = grown(answer(1, 9), [answer(4, finished=False)], [[5] * 17])
    assert len(made) == 20
    assert not made.finished
    assert cap == 1


def test_what_anothers_cap_cut_off_goes_on():
    caps = []
    sampled = []

    def answering(contexts, places, most):
        caps.append((len(contexts), most))
        sampled.append(list(places))
        return [answer(*[3] * most, finished=False) for _ in contexts]

    first = [[answer(1, 9)], [answer(*[1] * 7, 9)]]
    made = go_on(
        [[7], [8]],
        first,
        answering=answering,
        following=lambda *_: [5],
        turns=2,
        cap=10,
    )
    assert caps == [(2, 1), (1, 6)], "the one with least room says how far all go"
    assert sampled == [[(0, 2), (1, 8)], [(0, 3)]], "each goes on in its own random numbers"
    for (episode,) in made:
        assert len(episode) == 10
        assert episode.sampled == 9
        assert not episode.finished


# --- what stands between answers --------------------------------------------------------------------------------------


def test_a_chats_second_message_stands_where_its_template_puts_it():
    tokenizer = speaker(CHATML)
    chat = chat_of(tokenizer)
    turns = [("user", "Hi"), ("assistant", "Yes?"), ("user", "Go <|im_end|>on")]
    messages = [{"role": role, "content": content} for role, content in turns]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = chat.ids("Hi") + tokenizer("Yes?<|im_end|>")["input_ids"] + chat.later("Go <|im_end|>on\n")
    assert tokenizer.decode(ids) == whole
    assert ids.count(chat.end) == 3, "two ends of messages, one of an answer, and the one in the message is plain text"


def test_a_run_with_turns_has_a_digest_of_the_text_between_answers_too():
    chat = chat_of(speaker(CHATML))
    assert chat.digest() != chat.digest(2)
    assert chat_with(speaker(CHATML), chat.digest(2), turns=2).between == chat.between
    with pytest.raises(UsageError, match="which this model has not"):
        chat_with(speaker(CHATML), chat.digest(), turns=2)
    run = make_run(packet=3, turns=2, chat=chat.digest(2))
    assert packets_of(run, speaker(CHATML), arithmetic_settings()).asked.chat is not None


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("assistant\n", "assistant {{ messages|length }}\n"),
        CHATML.replace("{% for", "{% if messages|length > 2 %}{{ raise_exception('no') }}{% endif %}{% for", 1),
    ],
)
def test_a_template_without_a_text_between_answers_is_no_chat_for_episodes(template):
    chat = chat_of(speaker(template))
    assert chat.between is None
    assert chat.digest()
    why = "has no fixed text between an answer and the message that follows it"
    with pytest.raises(UsageError, match=why):
        chat.digest(2)
    with pytest.raises(UsageError, match=why):
        frame_of(speaker(template), "{question}\n", chat)


def test_in_plain_text_a_message_stands_in_the_runs_template_on_a_line_of_its_own():
    tokenizer = speaker(None)
    frame = frame_of(tokenizer, "Say: {question}\n", None)
    assert tokenizer.decode(frame.later(" lower <eos> ")) == "\nSay: lower <eos>\n"
    assert tokenizer.eos_token_id not in frame.later("lower <eos>")


# --- what they are worth ----------------------------------------------------------------------------------------------


TOKENIZER = tiny_tokenizer()
EPISODES = Episodes(TOKENIZER, Frame(TOKENIZER, "", "=", "\n"), TURNS)
ROW = Example("1+2=", "3")
END = TOKENIZER.eos_token_id


def ids(text):
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def episode(*texts, finished=True):
    """Answers and what is said between them, in turn."""
    tokens = []
    given = []
    for index, text in enumerate(texts):
        said = index % 2 == 1
        run = ids(text)
        if not said:
            run.append(END)
        tokens += run
        given += [said] * len(run)
    made = answer(*tokens, finished=finished)
    if not any(given):
        return made
    where = np.array(given)
    return replace(made, logprobs=made.logprobs[~where], given=where)


@pytest.mark.parametrize(
    ("made", "reward"),
    [
        (episode("4", "\n-=", "5", "\n-=", "3"), 1.0),
        (episode("4", "\n-=", "5", "\n-=", "4"), 0.0),
        (episode("="), 0.0),
        (episode("3", "\n+=", "="), 0.0),
        (episode("4", "\n-=", "5", "\n-=", "3", finished=False), 0.0),
        (episode("4"), 0.0),
    ],
)
def test_an_episode_is_worth_what_its_environment_gives_once_it_is_over(made, reward):
    assert EPISODES.score(made, ROW, Hints()).reward == reward


@pytest.mark.parametrize(
    "forged",
    [
        episode("4", "\n+=", "5", "\n-=", "3"),
        episode("4", "\n-=", "5", "\n-=", "3", "\n-=", "3"),
        episode("4", "\n-", "5", "\n-=", "3"),
        episode("=", "\n-=", "3"),
        episode("4", "\n--=", "3"),
    ],
)
def test_a_group_with_a_word_that_nobody_said_has_no_signal(forged):
    honest = episode("4", "\n-=", "5", "\n-=", "3")
    assert EPISODES.score(forged, ROW, Hints()) is None
    assert EPISODES.rewards([honest, honest], ROW, Hints()) == [1.0, 1.0]
    assert EPISODES.rewards([honest, forged, honest], ROW, Hints()) == [0.0] * 3


class Failing(Hints):
    def replay(self, answers, gold):
        return None


def test_an_environment_that_fails_gives_no_reward_and_vouches_for_nothing(monkeypatch):
    assert EPISODES.score(episode("3"), ROW, Failing()) == Score(0.0, formatted=False, lenient=False)
    assert EPISODES.rewards([episode("3", "\n+=", "3")], ROW, Failing()) == [0.0]
    assert EPISODES.following(episode("3"), ROW, Failing()) == []
    begun = []
    monkeypatch.setattr(Failing, "begin", lambda self: begun.append(self))
    assert judge(EPISODES.tokenizer, episode("3"), ROW, Failing(), EPISODES).score.reward == 0.0
    assert begun, "failures of other questions do not count"


# --- in the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch) -> Engine:
    monkeypatch.setattr(engines, "load_task", lambda *_, **__: task())
    made = Engine()
    facts = made.load(arithmetic_settings(generation_batch=16, eval_prompts=6), "arithmetic").shared()
    run = run_for(facts, group=4)
    assert run.packet == 3
    assert run.turns == TURNS
    check_fit(run, facts, "tiny-a")
    made.open(run)
    return made


def test_groups_are_sampled_admitted_and_worth_the_same_to_another_node(engine):
    author = identity(0).author
    context = AdmissionContext(engine.run, prompt_digests(engine.prompts))
    rows = [draw(engine.run.id, author, 7, slot, context.rows) for slot in range(6)]
    made = engine.generate(rows, author, 7, 3, list(range(6)))
    said = False
    for row, group in zip(rows, made.groups, strict=True):
        admitted = admit(context, author, group.packet)
        assert isinstance(admitted, Group), admitted
        assert engine.score(row, group.packet) == group.rewards
        for completion in admitted.packet.completions():
            said |= completion.given is not None
            prefixed = Prefixed(engine.prompts[row], [completion.token_ids], [completion.given])
            fresh, *_ = completion_logprobs(engine.policy, [prefixed], engine.run.temperature)
            np.testing.assert_allclose(fresh.detach(), completion.logprobs, atol=2e-3)
    assert said, "the environment had its say"


def test_a_step_takes_episodes_and_counts_sampled_tokens(engine):
    groups = engine.generate([0, 1]).groups
    report = engine.step(batch_of([0, 1], groups, uneven=True))
    assert report.skipped is None
    assert report.tokens == sum(sum(decode(group.packet).lengths) for group in groups)
    assert engine.evaluate().prompts == 6
    (text,) = engine.texts([ReadableGroup(0, groups[0].packet, 1)])
    assert text.question == engine.task.train[0].question
    assert len(text.completions) == 1


def test_a_run_of_another_number_of_turns_and_one_of_any_tokenizer_are_refused(engine):
    facts = Engine().load(arithmetic_settings(), "arithmetic").shared()
    run = engine.run.model_copy(update={"turns": 2})
    with pytest.raises(UsageError, match="has up to 3 turns, and one of the run 2"):
        check_fit(run, facts, "tiny-a")
    with pytest.raises(UsageError, match="such a run is for one tokenizer"):
        run_for(facts, any_tokenizer=True)
