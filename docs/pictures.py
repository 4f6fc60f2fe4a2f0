"""The pictures of the documentation, from real runs on this machine: python docs/pictures.py [report | explain | ...]

The report: examples/digits.py on two processes, one of them killed in the middle; light, dark, and as wide as a phone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
TERMINALS = {
    "explain": "explain tests/cases/made_here/torchrun-raises.log",
    "run": "run --nproc 2 --cpu examples/digits.py --epochs 4 --dir {folder}/digits",
    "plan": "plan --gpu T4 --nproc 2 examples/gpt.py",
}
SCREENS = {"report": (1200, 1500, False), "report-dark": (1200, 1500, True), "report-phone": (390, 1500, False)}
COLUMNS = 110


def killed_run(folder: Path) -> Path:
    """A run that lost rank 1 after its first checkpoint, and went on."""
    argv = [
        sys.executable,
        "-m",
        "evener",
        "run",
        "--nproc",
        "2",
        "--cpu",
        "--restarts",
        "1",
        "--set",
        "save_every=100",
    ]
    argv += [str(ROOT / "examples" / "digits.py"), "--dir", str(folder / "digits")]
    job = subprocess.Popen(argv, cwd=folder)
    while job.poll() is None:
        time.sleep(0.2)
        try:
            rank = json.loads((folder / "digits" / "pulse-rank1.json").read_text())
            saved = any((folder / "digits" / "checkpoints").glob("update-*"))
        except (OSError, ValueError):
            continue
        if saved and rank["update"] > 130:
            os.kill(rank["pid"], signal.SIGKILL)
            break
    assert job.wait() == 0
    return folder / "digits"


def report(folder: Path) -> None:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    run = killed_run(folder)
    subprocess.run([sys.executable, "-m", "evener", "report", str(run)], cwd=folder, check=True)
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver")) as browser:
        browser.set_page_load_timeout(300)
        for name, (width, height, dark) in SCREENS.items():
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
            browser.get((run / "report.html").as_uri())
            time.sleep(2)
            browser.save_screenshot(str(IMAGES / f"{name}.png"))


def terminal(name: str, folder: Path) -> None:
    from rich.console import Console
    from rich.text import Text

    words = TERMINALS[name].format(folder=folder).split()
    environ = {**os.environ, "COLUMNS": str(COLUMNS)}
    argv = [sys.executable, "-m", "evener", *words]
    done = subprocess.run(argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    screen = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    shown = " ".join(["$ evener", *words]).replace(f"{folder}/", "runs/")
    screen.print(Text.from_ansi(f"{shown}\n{done.stdout}".replace(f"{folder}/", "runs/")))
    svg = screen.export_svg(title=f"evener {words[0]}")
    (IMAGES / f"{name}.svg").write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # no other hosts


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if not words or "report" in words:
            report(Path(folder))
        for name in TERMINALS:
            if not words or name in words:
                terminal(name, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
