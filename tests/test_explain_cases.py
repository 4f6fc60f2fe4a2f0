"""`explain` on public failure reports: kind, culprit, sub-cause and advice, on the texts as they were and mutated.

The cases are facts from public issue threads (tests/cases/failures/cases.json); their sentences are nowhere in the
kinds. Each mutation is something that happens to logs: several writers in one file, other launchers' marks, noise before
and after, lost beginnings and ends, terminals that break lines, other releases' wordings, shredded text.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from evener.explain import explain_text
from evener.explain.kinds import STAGES, all_kinds
from evener.explain.lines import parse
from evener.explain.read import Raw
from evener.explain.shredded import SHORTEST, search

CASES = json.loads((Path(__file__).parent / "cases" / "failures" / "cases.json").read_text("utf-8"))
WITH_LOG = [case for case in CASES if "".join(case["log"]).strip()]
NOISE = [
    "node-1:4163:4200 [{gpu}] NCCL INFO Channel 0{gpu}/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
    "node-1:4163:4200 [{gpu}] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.",
    "\x1b[32m2026-11-29 10:00:0{gpu}\x1b[0m | INFO | train:main:88 - epoch 3 loss 0.412 lr 1.0e-04",
    "epoch 3:  4{gpu}%|████▏     | 41{gpu}/1000 [00:41<00:58,  9.98it/s]\repoch 3:  42%|████▏     | 420/1000 [00:42<00:58]",
    "W1129 10:00:00.000000 101 torch/distributed/run.py:774] Setting OMP_NUM_THREADS environment variable for each",
]
LAUNCHER = """\
W1129 11:00:00.000000 99 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 777 closing signal SIGTERM
Traceback (most recent call last):
  File "/env/bin/torchrun", line 8, in <module>
    sys.exit(main())""".splitlines()


def noise(draw: random.Random, count: int) -> list[str]:
    return [draw.choice(NOISE).format(gpu=draw.randrange(8)) for _ in range(count)]


def marked(lines: list[str]) -> bool:
    """Whether the text has ranks of its own."""
    return bool(re.search(r"\[?[Rr]ank ?:? ?\d|local_rank|^\d+: |pid[=:]|\[E\d|api\b", "\n".join(lines)))


def other_writers(lines: list[str], draw: random.Random) -> list[str]:
    mark = "" if marked(lines) else "[rank2]: "
    out = []
    for line in lines:
        out += [f"[rank{draw.choice((0, 1, 3))}]: step {draw.randrange(999)} ok" for _ in range(draw.randrange(3))]
        out.append(mark + line)
    return out


def other_marks(lines: list[str], draw: random.Random) -> list[str]:
    if marked(lines):
        return lines
    mark = draw.choice(["3: ", "(Worker pid=91) ", "[default1]:", "[2026-11-29 10:00:00,123] ", "[pod/train-0/main] "])
    return [mark + line for line in lines]


def noisy(lines: list[str], draw: random.Random) -> list[str]:
    return [*noise(draw, 150), *lines, *noise(draw, 20)]


def ended_by_a_launcher(lines: list[str], draw: random.Random) -> list[str]:
    return [*lines, *noise(draw, 3), *LAUNCHER]


def told(case: dict, lines: list[str]) -> bool:
    """Whether the lines still have what the kind is recognised by."""
    kinds = [all_kinds()[name] for name in (case["kind"], *case["accept"])]
    memory = [all_kinds()["oom-capacity"]] if case["kind"].startswith("oom") else []
    text = "\n".join(lines)
    return any(p.search(text) for kind in [*kinds, *memory] for p in kind.match) and len(lines) > 1


def cut_head(lines: list[str], draw: random.Random) -> list[str]:
    return lines[draw.randrange(1, max(2, len(lines) // 2)) :]


def cut_tail(lines: list[str], draw: random.Random) -> list[str]:
    return lines[: -draw.randrange(1, max(2, len(lines) // 2))]


def wrapped(lines: list[str], draw: random.Random) -> list[str]:
    """As a terminal of 100 columns, or a mail, breaks long lines."""
    out = []
    for line in lines:
        while len(line) > 100 and " " in line[40:100]:
            at = line.rindex(" ", 40, 100)
            out.append(line[:at])
            line = line[at + 1 :]
        out.append(line)
    return out


WORDINGS = [
    (r"torch\.cuda\.OutOfMemoryError", "torch.OutOfMemoryError"),
    (r"torch\.OutOfMemoryError", "RuntimeError"),
    (
        r"GPU (\d) has a total capac?ity of ([\d.]+ .iB) of which ([\d.]+ (?:.iB|bytes)) is free\..*?([\d.]+ .iB) is allocated"
        r" by PyTorch, and ([\d.]+) (.iB) is reserved by PyTorch but unallocated",
        r"(GPU \1; \2 total capacity; \4 already allocated; \3 free; \5 \6 is reserved by PyTorch but unallocated)",
    ),
    (r"CUDA out of memory", "HIP out of memory"),
    (r"torch\.distributed\.DistBackendError", "RuntimeError"),
    (r"NumelIn=(\d+), NumelOut=\d+", r"TensorShape=[\1]"),
    (r"last (enqueued|completed) NCCL work", r"last \1 work"),
    (r"failed \(exitcode: (-?\d+)\) local_rank: (\d)", r"failed (exitcode: \1) local_rank: \2"),
    (r"python3\.\d+", "python3.12"),
    (r"errno: 98 - Address already in use", "code: -98, name: EADDRINUSE, message: address already in use"),
    (r"DataLoader worker \(pid (\d+)\)", r"DataLoader worker (pid(s) \1)"),
]


def other_words(lines: list[str], draw: random.Random) -> list[str]:
    text = "\n".join(lines)
    for old, new in WORDINGS:
        if draw.random() < 0.7:
            text = re.sub(old, new, text)
    return text.split("\n")


MUTATIONS = {
    "as it was": lambda lines, draw: lines,
    "other writers": other_writers,
    "other marks": other_marks,
    "noise around": noisy,
    "launcher's end": ended_by_a_launcher,
    "head cut": cut_head,
    "tail cut": cut_tail,
    "wrapped": wrapped,
    "other words": other_words,
}


def culprit_is_right(case: dict, answer, mutation: str) -> bool | None:
    want = case["culprit"]
    if want is None or mutation in ("head cut", "tail cut"):
        return None
    if want == "unknown":
        return not answer.culprit_known
    if want == "nobody":
        return answer.culprit_rank is None
    if want == "all":
        return isinstance(answer.culprit_rank, list) and len(answer.culprit_rank) > 1
    return answer.culprit_rank == want


@pytest.fixture(scope="module")
def table(test_seed):
    """mutation -> [right kinds, texts, right culprits, known culprits, wrong ones]."""
    draw = random.Random(test_seed)
    rows = {}
    for name, mutate in MUTATIONS.items():
        row = [0, 0, 0, 0, []]
        for case in WITH_LOG:
            lines = mutate(list(case["log"]), draw)
            if "cut" in name and not told(case, lines):
                continue  # nothing is left that could be recognised
            if "launcher" in name and all_kinds()[case["kind"]].stage == STAGES.index("condition"):
                continue  # a warning, and a failure of which nothing is said
            answer = explain_text("\n".join(lines))
            accepted = [case["kind"], *case["accept"]]
            # without torchrun's closing table what it hides is simply an exception, or a lost peer
            if "cut" in name:
                accepted += {"B170": ["python-exception", "peer-gone"], "B171": ["peer-gone"]}.get(case["id"], [])
            # one skipped step in a long log is a scaler at work
            accepted += [None] if name == "noise around" and case["id"] == "B140" else []
            right = answer.kind in accepted
            row[0] += right
            row[1] += 1
            culprit = culprit_is_right(case, answer, name)
            if culprit is not None:
                row[2] += culprit
                row[3] += 1
            if not right or culprit is False:
                row[4].append(f"{case['id']}: {answer.kind} {answer.culprit_rank}")
        rows[name] = row
    return rows


def test_accuracy_over_the_cases_and_their_mutations(table, capsys):
    with capsys.disabled():
        print(f"\n{'':14} {'kind':>14} {'culprit':>14}  wrong")
        for name, (kinds, texts, culprits, known, wrong) in table.items():
            shares = [
                f"{good}/{of} {100 * good / of:.0f}%" if of else "-" for good, of in ((kinds, texts), (culprits, known))
            ]
            print(f"{name:14} {shares[0]:>14} {shares[1]:>14}  {', '.join(wrong)}")
    for name, (kinds, texts, culprits, known, wrong) in table.items():
        assert kinds >= 0.97 * texts, (name, wrong)
        assert culprits >= 0.95 * known, (name, wrong)


@pytest.mark.parametrize("case", [case for case in WITH_LOG if case["sub_cause"]], ids=lambda case: case["id"])
def test_the_sub_cause_that_a_case_names(case):
    assert explain_text("\n".join(case["log"])).sub_cause == case["sub_cause"]


@pytest.mark.parametrize("case", [case for case in WITH_LOG if "avoid_names" in case], ids=lambda case: case["id"])
def test_advice_that_hurts_is_named_and_never_given(case):
    for language in ("en", "zh"):
        answer = explain_text("\n".join(case["log"]), language)
        if case["never_a_fix"]:
            assert not re.search(case["never_a_fix"], " ".join(answer.fix))
        if language == "en":
            assert re.search(case["avoid_names"], " ".join(answer.avoid))
        assert len(answer.avoid) >= 1


def test_every_kind_of_the_taxonomy_has_its_cases():
    by_kind = Counter(case["kind"] for case in CASES)
    assert len(by_kind) == 59
    for name in by_kind:
        assert {case["id"] for case in CASES if case["kind"] == name} <= set(all_kinds()[name].cases), name


def shred(texts: list[str], draw: random.Random) -> str:
    """Several writers, character by character."""
    rest, out = [list(text) for text in texts], []
    while any(rest):
        one = draw.choice([letters for letters in rest if letters])
        out.append(one.pop(0))
    return "".join(out)


def test_two_ranks_that_shred_one_message(test_seed):
    draw = random.Random(test_seed)
    missed, tried = [], 0
    for kind in all_kinds().values():
        phrases = [phrase for phrase in kind.shredded if len(phrase.replace(" ", "")) >= SHORTEST]
        for phrase in phrases * 3:
            line = f"RuntimeError: {phrase}"
            text = "step 1 ok\n" + shred([line, line], draw) + "\nexit\n"
            tried += 1
            if explain_text(text).kind != kind.name:
                missed.append((kind.name, text))
    assert tried > 100 and len(missed) <= 0.15 * tried, missed


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[1] / "docs").glob("*.md")), ids=lambda file: file.name)
def test_ordinary_text_has_no_shredded_phrases(file):
    lines = list(parse([Raw(file.name, n, line) for n, line in enumerate(file.read_text("utf-8").splitlines(), 1)]))
    for start in range(0, len(lines), 400):
        assert list(search(lines[start : start + 400], all_kinds().values())) == []


HEALTHY = sorted((Path(__file__).parent / "cases" / "healthy").glob("*.log"))


def test_there_are_twenty_healthy_logs():
    assert len(HEALTHY) >= 20


@pytest.mark.parametrize("file", HEALTHY, ids=lambda file: file.stem)
def test_nothing_is_found_in_a_healthy_log(file):
    """Outputs of jobs that ran to their end here, and of GPU jobs and schedulers written down."""
    answer = explain_text(file.read_text("utf-8"))
    assert answer.kind is None, answer


def test_the_cases_carry_no_comments_into_the_text():
    assert not [case["id"] for case in CASES for line in case["log"] if line.lstrip().startswith("#")]
