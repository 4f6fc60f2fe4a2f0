"""The linter sees branches, aliases and other files: who calls a function under which rank test, with what."""

from __future__ import annotations

import textwrap

import pytest

from evener.lint import Options, lint
from evener.lint.file import File
from tests.test_lint_rules import checked


def found(tmp_path, **files: str) -> set[tuple[str, int, str]]:
    for name, code in files.items():
        path = tmp_path / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
    return {(one.path.removeprefix(f"{tmp_path}/"), one.line, one.rule) for one in lint([tmp_path]).findings}


def rules_in(code: str) -> set[str]:
    return {one.rule for one in checked(textwrap.dedent(code)) if one.level != "hint"}


LOOP = """
    import torch
    def train(model, loader, optimizer, scaler=None):
        for x, y in loader:
            loss = f(model(x), y)
            if {test}:
                {scaled}
            else:
                loss.backward()
            {between}
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if {again}:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
"""


@pytest.mark.parametrize(
    "test, again, between, fires",
    [
        ("scaler is not None", "scaler is not None", "", True),
        ("scaler is not None", "scaler", "", True),
        ("scaler", "scaler is not None", "if scaler is not None: scaler.unscale_(optimizer)", False),
        ("use_amp", "use_amp", "if not use_amp: pass\n            else: scaler.unscale_(optimizer)", False),
    ],
)
def test_branches_that_need_opposite_tests_exclude_each_other(test, again, between, fires):
    code = LOOP.format(test=test, again=again, between=between, scaled="scaler.scale(loss).backward()")
    found = rules_in(code)
    assert ("clip-before-unscale" in found) == fires
    assert not found & {"unscaled-backward", "unscaled-step-with-scaler"}, "each branch is right in itself"


def test_a_clip_in_the_branch_without_a_scaler_is_right():
    assert (
        rules_in("""
        import torch
        def step(loss, model, optimizer, scaler):
            if scaler:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
                optimizer.step()
    """)
        == set()
    )


@pytest.mark.parametrize(
    "line",
    [
        "import torch.nn.parallel as p; W = p.DistributedDataParallel",
        "from torch.nn.parallel import DistributedDataParallel as W",
        "from torch.nn import parallel; W = parallel.DistributedDataParallel",
        "import torch; W = torch.nn.parallel.DistributedDataParallel",
        "from torch.nn.parallel.distributed import DistributedDataParallel as W",
    ],
)
def test_imports_and_other_names_are_resolved(line):
    code = f"import torch.distributed as d\n{line}\nmodel = W(net)\nif d.get_rank() == 0:\n    model(x)\n"
    assert "ddp-forward-on-one-rank" in rules_in(code)


def test_a_parameter_hides_an_import():
    code = "import torch\nfrom torch.cuda import amp\ndef f(amp):\n    return amp.autocast()\n"
    assert [one.line for one in checked(code) if one.rule == "cuda-amp-deprecated"] == [2]


ONE_RANK = [
    "rank == 0",
    "not rank",
    "args.local_rank in [-1, 0]",
    "is_main_process()",
    "dist.get_rank() == 0",
    "0 == rank",
    "self.is_main",
    "rank < 1",
    "int(os.environ['RANK']) == 0",
    "x and rank == 0",
    "not dist.is_initialized() or rank == 0",
]
OTHERS = ["rank != 0", "rank > 0", "rank", "not is_main_process()"]
NOTHING = [
    "rank != -1",
    "args.local_rank >= 0",
    "rank >= 0",
    "world_size > 1",
    "x",
    "args.local_rank == -1",
    "epoch == 0",
]


@pytest.mark.parametrize(
    "test, who",
    [(t, "one") for t in ONE_RANK] + [(t, "others") for t in OTHERS[:2] + OTHERS[3:]] + [(t, "") for t in NOTHING],
)
def test_what_a_test_says_of_ranks(test, who):
    file = File("a.py", f"import torch.distributed as dist\nimport os\nif {test}:\n    pass\n".encode())
    node = file.tree.body[2].test
    assert file.one_rank(node) == who
    assert file.one_rank(node, False) == {"one": "others", "others": "one", "": ""}[who] or " and " in test


SAVE = """
    import torch
    def save_checkpoint(state, path):
        torch.save(state, path)
"""
MAIN = """
    import torch
    from {module} import save_checkpoint
    def main(rank):
        torch.distributed.init_process_group("nccl")
        model = torch.nn.parallel.DistributedDataParallel(net)
        {test}
            save_checkpoint(model.module.state_dict(), "last.pt")
    if __name__ == "__main__":
        main(0)
"""


@pytest.mark.parametrize("module, file", [("tools.io", "tools__io"), ("helper", "helper")])
@pytest.mark.parametrize(
    "test, fires",
    [("if rank == 0:", False), ("if True:", True), ("if rank != 0:\n            return\n        if True:", False)],
)
def test_a_save_is_judged_by_its_callers(tmp_path, module, file, test, fires):
    files = {"main": MAIN.format(module=module, test=test), file: SAVE}
    assert (f"{file.replace('__', '/')}.py", 4, "save-unguarded") in found(tmp_path, **files) or not fires
    assert any(rule == "save-unguarded" for _, _, rule in found(tmp_path, **files)) == fires


def test_a_save_that_nobody_is_seen_calling_is_not_judged(tmp_path):
    assert not any(rule == "save-unguarded" for _, _, rule in found(tmp_path, helper=SAVE))


def test_set_epoch_in_another_file_counts_even_when_only_one_file_is_named(tmp_path):
    main = """
        import torch
        from loop import run
        sampler = torch.utils.data.distributed.DistributedSampler(rows)
        for epoch in range(3):
            run(sampler, epoch)
    """
    loop = "import torch\ndef run(sampler, epoch):\n    {}\n    for x in loader: pass\n"
    (tmp_path / "main.py").write_text(textwrap.dedent(main))
    for line, fires in (("sampler.set_epoch(epoch)", False), ("pass", True)):
        (tmp_path / "loop.py").write_text(loop.format(line))
        report = lint([tmp_path / "main.py"])
        assert any(one.rule == "sampler-no-set-epoch" for one in report.findings) == fires
        assert report.files == 1


def test_a_model_is_followed_into_the_function_that_calls_it(tmp_path):
    caller = """
        import torch
        from evaluation import evaluate
        model = torch.nn.parallel.DistributedDataParallel(net)
        if torch.distributed.get_rank() == 0:
            evaluate(model, 3)
    """
    callee = """
        import torch
        def evaluate(net, n, rank=0):
            if rank == 0:
                return net(n)
    """
    assert ("evaluation.py", 5, "ddp-forward-on-one-rank") in found(tmp_path, train=caller, evaluation=callee)


def test_a_function_that_communicates_may_not_be_called_by_one_rank(tmp_path):
    helper = "import torch\ndef mean(x):\n    torch.distributed.all_reduce(x)\n    return x\n"
    main = "import torch\nfrom helper import mean\nif torch.distributed.get_rank() == 0:\n    print(mean(x))\n"
    assert ("main.py", 4, "rank-guarded-collective") in found(tmp_path, helper=helper, main=main)
    paired = main + "else:\n    mean(x)\n"
    assert not any(rule == "rank-guarded-collective" for _, _, rule in found(tmp_path, helper=helper, main=paired))


def test_a_file_that_does_not_parse_is_reported_and_passed_over(tmp_path):
    (tmp_path / "old.py").write_text("import torch\nprint 'python 2'\n")
    (tmp_path / "bytes.py").write_bytes(b"import torch\nx = '\xff'\n")
    (tmp_path / "good.py").write_text("import torch\nimport torch._six\n")
    report = lint([tmp_path])
    assert [(one.path.rpartition("/")[2], one.rule) for one in report.findings] == [
        ("bytes.py", "unreadable"),
        ("good.py", "removed-import"),
        ("old.py", "unreadable"),
    ]
    assert report.files == 3


@pytest.mark.parametrize("folder", [".venv", "venv", "build", "node_modules", ".git", "__pycache__", "myenv"])
def test_folders_that_are_not_the_project_are_passed_over(tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.py").write_text("import torch._six\n")
    if folder == "myenv":
        (tmp_path / folder / "pyvenv.cfg").touch()
    assert lint([tmp_path]).files == 0
    assert lint([tmp_path / folder / "a.py"]).files == 1, "a file that is named is taken"


def test_many_files_in_processes_give_what_one_process_gives(tmp_path):
    for i in range(40):
        (tmp_path / f"m{i}.py").write_text(
            "import torch\nfrom torch.cuda.amp import autocast\nwith autocast():\n    pass\n"
        )
    one, two = lint([tmp_path]), lint([tmp_path], Options(processes=2))
    assert one == two and len(one.findings) == 80


@pytest.mark.parametrize(
    "before, turn, after, fires",
    [
        ("model.train()", "pass", "pass", True),
        ("pass", "pass", "pass", True),
        ("pass", "model.train()", "pass", False),
        ("pass", "pass", "model.train(was)", False),
        ("pass", "train(model)", "pass", True),
        ("def train(model): model.train()", "train(model)", "pass", False),
        ("teacher = model", "pass", "break", False),
    ],
)
def test_a_model_that_never_goes_back_to_training_is_named(before, turn, after, fires):
    code = f"""
        import torch
        model = Net()
        {before}
        for epoch in range(3):
            {turn}
            for x, y in loader:
                f(model(x), y).backward()
                optimizer.step()
            model.eval()
            score(model)
            {after}
    """
    assert ("eval-without-train" in rules_in(code)) == fires


def test_a_model_in_evaluation_mode_while_it_trains_may_be_meant_so():
    code = """
        import torch
        model = Net()
        for x, y in loader:
            model.eval()
            f(model(x), y).backward()
    """
    assert "eval-without-train" not in rules_in(code)
