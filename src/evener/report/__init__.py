"""What a run tells: the line before training, the console, the run directory, and what is read from that again.

Nothing here imports torch. rich and tensorboard are imported when a bar or a curve is first drawn, on rank 0 only.

    contract.py   the contract line and the learning-rate line, from plain values
    console.py    what rank 0 shows: lines, and a bar on a terminal (bar.py draws it, text.py words it)
    folder.py     the run directory; its writers may fail without ending a training
    events.py     events.jsonl: the schema, the writer, the reader
    curves.py     TensorBoard's files, or the user's own logger
    goodput.py    what interruptions cost
    record.py     a run directory as bounded values; summary.py words them (words.toml), page.py makes the HTML
    live.py       the runs of this machine, for `evener top`
"""
