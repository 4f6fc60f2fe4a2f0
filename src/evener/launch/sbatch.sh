#!/bin/bash
# Submit it with: sbatch FILE. Add what your cluster wants: --partition, --account, --time, --cpus-per-task.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# USR1 comes 120 s before the time limit, to all processes: the ranks save, and the job goes back into the queue.
srun --kill-on-bad-exit=0 {command}
