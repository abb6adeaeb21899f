"""What an emulated engine says: a function of the text before it, and of nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.emulation.tokens import (
    Continuation,
    StopRules,
    Vocabulary,
    corrupt,
    text_state,
)

VOCABULARY = Vocabulary(alphabet=range(10, 110), eos_token_id=2, mean_output_tokens=20.0)
PROMPTS = st.lists(st.integers(0, 200_000), min_size=1, max_size=50)


def say(prompt, **rules):
    """The whole text after a prompt."""
    text = Continuation(text_state(prompt), StopRules(**rules), VOCABULARY)
    return text.between(0, text.length_tokens())


@given(prompt=PROMPTS, cut=st.integers(1, 29))
def test_any_engine_goes_on_exactly_where_another_stopped(prompt, cut):
    """The text after prompt plus some of its continuation is the rest of the continuation."""
    whole = say(prompt, max_tokens=30, ignore_eos=True)

    rest = say(prompt + whole[:cut], max_tokens=30 - cut, ignore_eos=True)

    assert whole[:cut] + rest == whole


@given(prompt=PROMPTS, cut=st.integers(0, 50))
def test_the_state_of_a_text_may_be_made_in_pieces(prompt, cut):
    """Reading a prompt at once or in two parts gives one state."""
    assert text_state(prompt[cut:], text_state(prompt[:cut])) == text_state(prompt)


def test_a_prompt_longer_than_a_chunk_has_one_state_too():
    """Prompts above the chunk of the vectorised hash are read in several passes."""
    prompt = [n % 997 for n in range(10_000)]
    state = 0
    for token in prompt:
        state = text_state([token], state)

    assert text_state(prompt) == state


@given(prompt=PROMPTS)
def test_texts_end_by_themselves_at_a_fixed_place(prompt):
    """Without ignore_eos the text ends with the end token, always after the same length."""
    text = say(prompt, max_tokens=100_000)

    assert text[-1] == VOCABULARY.eos_token_id
    assert VOCABULARY.eos_token_id not in text[:-1]
    assert say(prompt, max_tokens=100_000) == text


def test_texts_have_the_mean_length_that_was_asked_for():
    """The mean over many prompts is near the vocabulary's mean."""
    lengths = [len(say([n], max_tokens=100_000)) for n in range(2000)]

    assert 17 < sum(lengths) / len(lengths) < 23


def test_min_tokens_puts_the_end_off():
    """Before min_tokens no text ends by itself."""
    lengths = [len(say([n], max_tokens=1000, min_tokens=50)) for n in range(200)]

    assert min(lengths) > 50


def test_a_stop_token_ends_the_text_and_is_part_of_it():
    """The first occurrence of a stop token is the last token."""
    whole = say([7], max_tokens=200, ignore_eos=True)
    stop = whole[20]

    text = say([7], max_tokens=200, ignore_eos=True, stop_token_ids=frozenset({stop}))

    assert text == whole[: whole.index(stop) + 1]


def test_another_prompt_another_block_size_or_another_seed_say_something_else():
    """Whatever is wrong with a KV cache shows in the tokens."""
    state = text_state([1, 2, 3])
    right = Continuation(state, StopRules(max_tokens=8, ignore_eos=True), VOCABULARY).between(0, 8)
    for wrong in (text_state([1, 2, 4]), corrupt(state, 32), corrupt(state, 16)):
        text = Continuation(wrong, StopRules(max_tokens=8, ignore_eos=True), VOCABULARY)
        assert text.between(0, 8) != right
    seeded = StopRules(max_tokens=8, ignore_eos=True, seed_state=12345)
    assert Continuation(state, seeded, VOCABULARY).between(0, 8) != right
