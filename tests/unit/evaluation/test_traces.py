import pytest

from evaluation.errors import TraceFormatError
from evaluation.traces import read_trace
from evaluation.workloads import load_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.5000000,10,0
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0]}
{"timestamp": 0, "input_length": 12, "output_length": 5, "hash_ids": [1]}
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,7,1.2,ChatGPT,472,18,490,Conversation log
45.5,,2.0,GPT-4,1087,230,1317,API log
"""
JOURNAL = """{"type": "roster", "instances": []}
{"type": "request", "arrived_unix": 100.5, "prompt_tokens": 9, "completion_tokens": 4, "slo_class": "tight", "tenant": "shop"}
{"type": "request", "arrived_unix": 101.0, "prompt_tokens": 3, "completion_tokens": 0}
"""


def rows_of(tmp_path, name, text):
    """Return the rows of a trace with that text."""
    path = tmp_path / name
    path.write_text(text)
    return [tuple(row) for row in read_trace(path)]


def test_azure(tmp_path):
    """Azure rows are sorted by time from 0, those without output left out."""
    rows = rows_of(tmp_path, "t.csv", AZURE)

    assert [row[1:3] for row in rows] == [(374, 44), (396, 109)]
    assert [0.0, pytest.approx(4.314579, abs=1e-6)] == [row[0] for row in rows]


def test_mooncake_times_are_milliseconds(tmp_path):
    """Mooncake's timestamps are read as milliseconds."""
    rows = rows_of(tmp_path, "t.jsonl", MOONCAKE)

    assert [row[:3] for row in rows] == [(0.0, 12, 5), (3.0, 6758, 500)]


def test_burstgpt(tmp_path):
    """BurstGPT's seconds, lengths and sessions are read; an empty session is none."""
    rows = rows_of(tmp_path, "t.csv", BURSTGPT)

    assert rows == [(0.0, 472, 18, "", "", 7), (40.5, 1087, 230, "", "", 0)]


def test_journal(tmp_path):
    """The router's journal gives requests with class and tenant, and nothing else of it."""
    rows = rows_of(tmp_path, "t.jsonl", JOURNAL)

    assert rows == [(0.0, 9, 4, "tight", "shop", 0)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "a,b\n1,2\n", "columns"),
        ("t.csv", AZURE + "yesterday,1,2\n", "row 4"),
        ("t.jsonl", "", "no request"),
        ("t.jsonl", MOONCAKE + "{", "row 3"),
    ],
)
def test_bad_files(tmp_path, name, text, said):
    """A file that cannot be read is refused by row."""
    with pytest.raises(TraceFormatError, match=said):
        rows_of(tmp_path, name, text)


def test_trace_workload_is_scaled_and_cut(tmp_path):
    """A trace is replayed at the rate asked for, prompts and outputs cut, over and over."""
    (tmp_path / "t.jsonl").write_text(MOONCAKE)
    (tmp_path / "w.toml").write_text(
        'name = "mine"\n[trace]\npath = "t.jsonl"\nmax_prompt_tokens = 1000\nmax_output_tokens = 50\n'
    )
    workload = load_workload(str(tmp_path / "w.toml"))

    requests = list(workload.arrivals(4.0, 500.0, 1))

    assert len(requests) / 500.0 == pytest.approx(4.0, rel=0.35)
    assert {1000, 12} == {request.prompt_tokens for request in requests}
    assert {50, 5} == {request.output_tokens for request in requests}
    assert sorted(requests, key=lambda r: r.at_seconds) == requests
