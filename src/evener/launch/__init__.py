"""From a request to running ranks: `decide` gives a frozen Launch, `supervise` carries it out.

    machine     facts: CPUs, GPUs, loopback interface        command     the decision, as a value
    supervise   the process that stays                       console     rank 0's output, to terminal and log
    shim        the first program of every rank              records     how every rank ended
    failure     which end was the cause                      processes   ties between processes, the orderly end
    layout      which hosts make a job                       head        where they meet: who came, whose failure
    meeting     a host's own side of that                    batch       what Slurm and Kubernetes are given

torch's elastic agent does the process work; nothing here imports torch.
"""
