"""Room `verify`: the promise, proven on a user's own script.

    start     a trial of the script in child processes          forks     torch imported once, ranks forked
    proof     which trials, compared with which                 compare   two traces: equal, close, different, and where
    blame     what a difference says, in words

Nothing here imports torch: trials write files (`evener.run.trial`), and files are compared.
"""
