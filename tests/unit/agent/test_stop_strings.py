"""Stop strings in text that comes in pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dataplane.agent.stop_strings import StopScanner


def test_a_stop_string_cut_over_pieces_is_found():
    """Text before it is shown, it and what follows is not."""
    scanner = StopScanner(["STOP"])

    shown = "".join(scanner.feed(piece) for piece in ("hello ST", "OP", " more"))

    assert scanner.found == "STOP"
    assert shown.startswith("hello ")
    assert "STOP" not in shown


def test_the_first_of_several_wins():
    """Of two stop strings the one that begins first ends the text."""
    scanner = StopScanner(["world", "lo"])

    assert scanner.feed("hello world") == "hel"
    assert scanner.found == "lo"


def test_without_stop_strings_nothing_is_held_back():
    """Text passes at once."""
    assert StopScanner([]).feed("abc") == "abc"


@given(text=st.text("ab", max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_pieces_do_not_change_what_is_shown(text, cuts):
    """However a text is cut, the same part of it is shown."""
    scanner = StopScanner(["aab", "bb"])
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    for start, end in pairwise(edges):
        if not scanner.found:
            shown += scanner.feed(text[start:end])
    shown += "" if scanner.found else scanner.flush()

    hits = [text.find(stop) for stop in ("aab", "bb") if stop in text]
    assert shown == (text[: min(hits)] if hits else text)
