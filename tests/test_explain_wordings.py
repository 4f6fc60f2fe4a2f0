"""Other wordings of the same failures: other releases, other vendors, other systems, and kinds without a public case.

None of these texts is among the cases. They are written from what libraries, drivers, kernels and schedulers print.
"""

from __future__ import annotations

import re

import pytest

from evener.explain import explain_text

# (kind, sub-cause or None, culprit or None for "not asked", text)
TEXTS = [
    (
        "oom-capacity",
        None,
        None,
        "RuntimeError: HIP out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 15.98 GiB of which 200.00 MiB is free. Of the allocated memory 14.90 GiB is allocated by PyTorch, and 90.00 MiB is reserved by PyTorch but unallocated.",
    ),
    (
        "oom-capacity",
        None,
        None,
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 211 MB, max allowed: 18.1 GB). Tried to allocate 256 MB on private pool.",
    ),
    (
        "oom-capacity",
        None,
        None,
        "RuntimeError: CUDA out of memory. Tried to allocate 392.00 MiB (GPU 0; 10.76 GiB total capacity; 9.63 GiB already allocated; 120.69 MiB free; 9.70 GiB reserved in total by PyTorch)",
    ),
    (
        "oom-capacity",
        "one-request",
        None,
        "RuntimeError: CUDA out of memory. Tried to allocate 48.00 GiB (GPU 0; 23.69 GiB total capacity; 1.10 GiB already allocated; 22.10 GiB free; 1.20 GiB reserved in total by PyTorch)",
    ),
    (
        "oom-fragmentation",
        None,
        None,
        "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 11.91 GiB total capacity; 6.01 GiB already allocated; 1.21 GiB free; 10.21 GiB reserved in total by PyTorch)",
    ),
    (
        "oom-other-process",
        None,
        None,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 9.00 MiB is free. Process 3117 has 60.01 GiB memory in use. Including non-PyTorch memory, this process has 19.10 GiB memory in use. Of the allocated memory 18.40 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated.",
    ),
    (
        "oom-optimizer-step",
        None,
        1,
        '[rank1]:   File "train.py", line 80, in main\n[rank1]:     optimizer.step()\n[rank1]:   File "/env/lib/python3.12/site-packages/torch/optim/adam.py", line 500, in _init_group\n[rank1]:     state["exp_avg_sq"] = torch.zeros_like(p)\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 1 has a total capacity of 23.69 GiB of which 20.69 MiB is free. Of the allocated memory 23.00 GiB is allocated by PyTorch, and 30.00 MiB is reserved by PyTorch but unallocated.',
    ),
    (
        "oom-on-resume",
        None,
        None,
        'Traceback (most recent call last):\n  File "resume.py", line 9, in load\n    state = torch.load(path)\n  File "torch/serialization.py", line 1500, in restore_location\n    return default_restore_location(storage, location)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 1.69 MiB is free. Of the allocated memory 1.00 GiB is allocated by PyTorch, and 3.00 MiB is reserved by PyTorch but unallocated.',
    ),
    (
        "host-memory",
        None,
        None,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 274877906944 bytes. Error code 12 (Cannot allocate memory)",
    ),
    (
        "host-memory",
        None,
        None,
        'OSError: [WinError 1455] The paging file is too small for this operation to complete. Error loading "c10.dll"',
    ),
    (
        "host-memory",
        None,
        None,
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 512. GiB for an array with shape (1, 2) and data type float64",
    ),
    (
        "host-oom-sigkill",
        "cgroup",
        None,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=331.0. Some of the step tasks have been OOM Killed.",
    ),
    (
        "host-oom-sigkill",
        "container",
        None,
        "  State:          Terminated\n    Reason:       OOMKilled\n    Exit Code:    137",
    ),
    (
        "host-oom-sigkill",
        "kernel",
        None,
        "[88123.1] oom_reaper: reaped process 4163\n[88123.0] Out of memory: Killed process 4163 (python) total-vm:91234kB, anon-rss:61234567kB, file-rss:0kB",
    ),
    (
        "host-oom-sigkill",
        None,
        3,
        "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGKILL",
    ),
    (
        "host-oom-sigkill",
        None,
        None,
        "subprocess.CalledProcessError: Command '['/env/bin/python', 'train.py']' died with <Signals.SIGKILL: 9>.",
    ),
    (
        "shm-bus-error",
        None,
        None,
        "RuntimeError: unable to write to file </torch_123_456_0>: No space left on device (28)",
    ),
    (
        "shm-bus-error",  # inside of the wrapper that a worker's exception comes in
        None,
        None,
        'RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File "storage.py", line 414, in _new_using_fd_cpu\n    return cls(size)\nRuntimeError: unable to allocate shared memory(shm) for file </torch_7_8_0>: No space left on device (28)',
    ),
    (
        "shm-bus-error",
        None,
        None,
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ),
    (
        "shm-bus-error",
        "mapped-file",
        None,
        "Bus error (core dumped)\nFilesystem      Size  Used Avail Use% Mounted on\ntmpfs           64G   1G   63G   2% /dev/shm",
    ),
    (
        "device-assert-label",
        None,
        None,
        '../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.\nTraceback (most recent call last):\n  File "train.py", line 41, in step\n    total += loss.item()\nRuntimeError: CUDA error: device-side assert triggered',
    ),
    ("device-assert-label", None, None, "IndexError: Target 10 is out of bounds."),
    (
        "device-assert-label",
        None,
        None,
        "/pytorch/aten/src/ATen/native/cuda/Loss.cu:106: operator(): block: [0,0,0], thread: [64,0,0] Assertion `input_val >= zero && input_val <= one` failed.",
    ),
    (
        "device-assert-index",
        None,
        None,
        '../aten/src/ATen/native/cuda/ScatterGatherKernel.cu:144: operator(): block: [3,0,0], thread: [1,0,0] Assertion `idx_dim >= 0 && idx_dim < index_size && "index out of bounds"` failed.',
    ),
    (
        "device-assert-other",
        None,
        None,
        "torch.AcceleratorError: CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com/cuda for more information.",
    ),
    (
        "illegal-memory-access",
        None,
        None,
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    ),
    ("illegal-memory-access", None, None, "RuntimeError: CUDA error: misaligned address"),
    (
        "illegal-memory-access",
        None,
        None,
        "Memory access fault by GPU node-1 (Agent handle: 0x55d) on address 0x7f. Reason: Page not present or supervisor privilege.",
    ),
    (
        "device-mismatch",
        None,
        None,
        "RuntimeError: Expected all tensors to be on the same device, but got index is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA__index_select)",
    ),
    (
        "device-mismatch",
        None,
        None,
        "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    ),
    (
        "device-mismatch",
        None,
        None,
        "TypeError: can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.",
    ),
    (
        "invalid-device-ordinal",
        None,
        None,
        "torch.AcceleratorError: CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?",
    ),
    ("invalid-device-ordinal", None, None, "RuntimeError: HIP error: hipErrorInvalidDevice"),
    (
        "driver-too-old",
        None,
        None,
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11080). Please update your GPU driver",
    ),
    (
        "driver-too-old",
        None,
        None,
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    ),
    ("cuda-init-failed", None, None, "RuntimeError: No CUDA GPUs are available"),
    (
        "cuda-init-failed",
        "library-mix",
        None,
        "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on non supported HW",
    ),
    ("no-kernel-image", None, None, "RuntimeError: HIP error: invalid device function"),
    (
        "no-kernel-image",
        None,
        None,
        "Found GPU0 Tesla K40 which is of cuda capability 3.5.\nPyTorch no longer supports this GPU because it is too old.\nRuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    ("cuda-lib-conflict", None, None, "RuntimeError: cuDNN error: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"),
    (
        "cuda-lib-conflict",
        None,
        None,
        "ImportError: /env/lib/libcusparse.so.12: undefined symbol: __nvJitLinkComplete_12_4, version libnvJitLink.so.12",
    ),
    ("oom-in-disguise", None, None, "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (
        "oom-in-disguise",
        None,
        None,
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ),
    ("gpu-hardware", None, None, "[99.1] NVRM: Xid (PCI:0000:07:00): 79, pid=4163, GPU has fallen off the bus."),
    ("gpu-hardware", None, None, "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error"),
    (
        "abi-mismatch",
        None,
        None,
        "ImportError: /env/lib/python3.12/site-packages/torchtext.so: undefined symbol: _ZN3c106detail14torchCheckFailEPKcS2_jS2_",
    ),
    (
        "missing-cuda-ext",
        None,
        None,
        "ImportError: /env/lib/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZNK3c105Error4whatEv",
    ),
    (
        "abi-mismatch",
        None,
        None,
        "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by x.so)",
    ),
    (
        "abi-mismatch",
        None,
        None,
        "ImportError: DLL load failed while importing torch_python: The specified module could not be found.",
    ),
    (
        "nccl-timeout",
        "behind",
        2,
        "[rank0]:[E1 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=90, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n[rank0]: [PG ID 0 PG GUID 0(default_pg) Rank 0] failure detected by watchdog at work sequence id: 90 PG status: last enqueued work: 90, last completed work: 89\n[rank1]: [PG ID 0 PG GUID 0(default_pg) Rank 1] failure detected by watchdog at work sequence id: 90 PG status: last enqueued work: 90, last completed work: 89 timeout\n[rank2]: [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout: last enqueued work: 88, last completed work: 88",
    ),
    (
        "nccl-timeout",
        "different-calls",
        None,
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=100, NumelOut=100, Timeout(ms)=1800000) ran for 1800100 milliseconds before timing out.\n[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=BROADCAST, NumelIn=7, NumelOut=7, Timeout(ms)=1800000) ran for 1800100 milliseconds before timing out.",
    ),
    (
        "nccl-timeout",
        "silent",
        None,
        "world_size=4\n[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=100, NumelOut=100, Timeout(ms)=1800000) ran for 1800100 milliseconds before timing out.\n[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=100, NumelOut=100, Timeout(ms)=1800000) ran for 1800100 milliseconds before timing out.\n[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=100, NumelOut=100, Timeout(ms)=1800000) ran for 1800100 milliseconds before timing out.",
    ),
    (
        "nccl-timeout",
        None,
        None,
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    ),
    (
        "nccl-duplicate-gpu",
        None,
        None,
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 5 and rank 1 both on CUDA device c1000",
    ),
    (
        "nccl-network",
        None,
        None,
        "torch.distributed.DistBackendError: NCCL error: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\nsocketStartConnect: Connect to 172.17.0.3<41031> failed : Software caused connection abort",
    ),
    ("nccl-network", None, None, "node-2:77:99 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found"),
    ("nccl-shm", None, None, "node-2:77:99 [0] include/shm.h:23 NCCL WARN Call to shm_open failed : Permission denied"),
    ("peer-gone", None, None, "[rank2]: RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.3]:41031"),
    ("port-in-use", None, None, "OSError: [Errno 98] Address already in use"),
    (
        "port-in-use",
        "launcher-per-task",
        None,
        "SLURM_NTASKS=8\ntorch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    (
        "rendezvous-timeout",
        None,
        None,
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to (10.0.0.1, 29500).",
    ),
    (
        "rendezvous-timeout",
        "missing-ranks",
        None,
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 7/8 clients joined.",
    ),
    (
        "sighup",
        None,
        None,
        "W1129 10:00:00.0 99 torch/distributed/elastic/agent/server/api.py:741] Received 1 death signal, shutting down workers",
    ),
    (
        "torchrun-hidden-root-cause",
        None,
        4,
        "[2026-11-29 10:00:00,000] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 4 (pid: 991) of binary: /usr/bin/python3",
    ),
    (
        "ddp-unused-params",
        None,
        None,
        "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss returned by training_step.",
    ),
    (
        "ddp-rank-desync",
        "collective",
        None,
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[4]), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=BROADCAST, TensorShape=[8]).",
    ),
    (
        "ddp-rank-desync",
        "dead-peer",
        0,
        "[rank3]: RuntimeError: DDP expects same model across all ranks, but Rank 3 has 291 params, while rank 0 has inconsistent 140233 params.",
    ),
    (
        "ddp-rank-desync",
        None,
        1,
        "RuntimeError: [1]: params[0] in this process with sizes [8, 4] appears not to match sizes of the same param in process 0.",
    ),
    (
        "ckpt-prefix",
        "prefix-in-checkpoint",
        None,
        'RuntimeError: Error(s) in loading state_dict for OptimizedModule:\n\tMissing key(s) in state_dict: "layers.0.weight", "head.weight". \n\tUnexpected key(s) in state_dict: "_orig_mod.layers.0.weight", "_orig_mod.head.weight".',
    ),
    (
        "ckpt-corrupt",
        None,
        None,
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    ),
    ("ckpt-corrupt", None, None, "_pickle.UnpicklingError: invalid load key, 'v'."),
    ("disk-full", None, None, "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 640 vs 598"),
    ("disk-full", None, None, "OSError: [Errno 122] Disk quota exceeded: '/home/me/last.ckpt'"),
    (
        "dataloader-worker-exception",
        None,
        None,
        'ValueError: Caught ValueError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n  File "data.py", line 9, in __getitem__\n    raise ValueError(i)\nValueError: 17',
    ),
    ("dataloader-worker-died", None, None, "RuntimeError: DataLoader worker (pid(s) 991, 992) exited unexpectedly"),
    ("dataloader-too-many-files", None, None, "OSError: [Errno 24] Too many open files: '/proc/self/maps'"),
    (
        "spawn-no-main-guard",
        None,
        None,
        "RuntimeError: \n        An attempt has been made to start a new process before the\n        current process has finished its bootstrapping phase.",
    ),
    (
        "inductor-toolchain",
        None,
        None,
        "torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
    ),
    (
        "inductor-toolchain",
        None,
        None,
        "/tmp/tmpx/main.c:4:10: fatal error: Python.h: No such file or directory\ncompilation terminated.",
    ),
    ("dynamo-unsupported", None, None, "torch._dynamo.exc.Unsupported: Data-dependent branching"),
    ("not-finite", None, None, "ValueError: Loss is nan, stopping training"),
    (
        "shape-mismatch",
        None,
        None,
        "RuntimeError: The size of tensor a (128) must match the size of tensor b (64) at non-singleton dimension 1",
    ),
    ("api-mismatch", "local-rank-flag", None, "train.py: error: unrecognized arguments: --local-rank=0"),
    ("api-mismatch", None, None, "TypeError: Trainer.__init__() got an unexpected keyword argument 'gpus'"),
    ("module-missing", None, None, "ModuleNotFoundError: No module named 'einops'"),
    (
        "locale-encoding",
        None,
        None,
        "UnicodeEncodeError: 'ascii' codec can't encode characters in position 0-3: ordinal not in range(128)",
    ),
    (
        "download-failed",
        None,
        None,
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
    ),
    (
        "scheduler-limit",
        None,
        None,
        "slurmstepd: error: *** JOB 331 ON node-1 CANCELLED AT 2026-11-29T10:00:00 DUE TO TIME LIMIT ***",
    ),
    ("scheduler-limit", None, None, "Warning  Evicted  2m  kubelet  The node was low on resource: ephemeral-storage."),
    (
        "scheduler-refused",
        None,
        None,
        "Warning  FailedScheduling  1m  default-scheduler  0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
    ),
    (
        "scheduler-refused",
        None,
        None,
        "srun: error: Unable to create step for job 331: Invalid generic resource (gres) specification",
    ),
    ("segfault", None, 1, "srun: error: node-1: task 1: Segmentation fault (core dumped)"),
    (
        "stopped-by-signal",
        None,
        None,
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\nKeyboardInterrupt',
    ),
    (
        "evener-error",
        None,
        None,
        "evener: precision='fp8' is not known.\n  fix: precision=\"fp16\"\n       precision is one of: auto, fp32\n  at /home/me/train.py:9",
    ),
    ("evener-stopped", None, None, "srun: error: node-1: task 0: Exited with exit code 75"),
    (
        "python-exception",
        None,
        2,
        "[rank2]: Traceback (most recent call last):\n[rank2]:   File \"/home/me/train.py\", line 12, in load\n[rank2]:     return table[key]\n[rank2]: KeyError: 'labels'",
    ),
    # --- as other frameworks and releases say it
    (
        "segfault",
        None,
        None,
        "[2026-07-20 15:45:13,980] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 3966\n[2026-07-20 15:45:13,982] [ERROR] [launch.py:321:sigkill_handler] ['/env/bin/python', '-u', 'main.py', '--local_rank=1'] exits with return code = -11",
    ),
    (
        "optimizer-state-mismatch",
        None,
        None,
        "│ ❱ 935 │   │   │   raise ValueError(                                    │\n╰───────────────────────────────╯\nValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
    ),
    (
        "rendezvous-timeout",
        None,
        None,
        "(Worker pid=213) ERROR 08-03 13:35:33 [executor.py:912] Traceback (most recent call last):\n(Worker pid=213) ERROR 08-03 13:35:33 [executor.py:912] torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    ),
    (
        "gpu-hardware",  # the kernel knows no rank; the watchdog's "Rank 1" is that of its group
        None,
        9,
        "[rank9]:[E113 11:43:02.24 ProcessGroupNCCL.cpp:1899] [PG ID 5 PG GUID 55(mesh) Rank 1] Process group watchdog thread terminated with exception: CUDA error: unspecified launch failure\n[ 8123.4] NVRM: Xid (PCI:0000:01:00): 109, pid=4124, name=python, Ch 00000028, errorString CTX SWITCH TIMEOUT",
    ),
    (
        "fsdp-uniform-dtype",
        None,
        1,
        'torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File "/home/me/train.py", line 127, in worker\n    policy = FSDP(policy)\nValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32',
    ),
    (
        "invalid-device-ordinal",
        None,
        None,
        "lightning.fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1, 2, 3]\n But your machine only has: [0, 1]",
    ),
    (
        "cuda-init-failed",
        "busy",
        None,
        "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    ),
    ("nccl-timeout", "absent", 5, "[rank0]: RuntimeError: Rank 5 failed to pass monitoredBarrier in 1800000 ms"),
    (
        "nccl-timeout",
        "absent",
        3,
        "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 3. Please check rank 3 logs for faulty rank.",
    ),
    (
        "amp-scale-collapse",
        "collapse",
        None,
        "".join(
            f"[INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2 ** (20 - i)}, reducing to {2 ** (19 - i)}\n"
            for i in range(24)
        ),
    ),
    (
        "oom-capacity",  # deepspeed's launcher names whoever it looked at last
        None,
        3,
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 260.00 MiB. GPU 3 has a total capacity of 44.34 GiB of which 60.88 MiB is free. Of the allocated memory 42.02 GiB is allocated by PyTorch, and 1.42 GiB is reserved by PyTorch but unallocated.\n[2026-01-02 10:10:10,982] [ERROR] [launch.py:325:sigkill_handler] ['/env/bin/python', '-u', 'sft.py', '--local_rank=7'] exits with return code = -6",
    ),
    (
        "host-oom-sigkill",  # Ray's error of that name is the host's memory
        None,
        None,
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ),
    (
        "stopped-by-signal",
        None,
        None,
        '[rank: 0] Received SIGTERM: 15\nTraceback (most recent call last):\n  File "train.py", line 3, in <module>\n    trainer.fit(m)\nlightning.pytorch.utilities.exceptions.SIGTERMException',
    ),
    (
        "ckpt-size-mismatch",  # a log in which every line has a time
        None,
        None,
        "[2026-11-29 10:00:00,123] RuntimeError: Error(s) in loading state_dict for Net:\n[2026-11-29 10:00:00,124]         size mismatch for head.bias: copying a param with shape torch.Size([80]) from checkpoint, the shape in current model is torch.Size([9]).",
    ),
    (
        "illegal-memory-access",  # a line that a terminal has broken keeps its writer
        None,
        0,
        "[E ProcessGroupNCCL.cpp:916] [Rank 0] NCCL watchdog thread terminated with exception: CUDA error:\nan illegal memory access was encountered",
    ),
]


@pytest.mark.parametrize("kind, sub, culprit, text", TEXTS, ids=[f"{n}-{one[0]}" for n, one in enumerate(TEXTS)])
def test_a_kind_is_known_in_other_words(kind, sub, culprit, text):
    answer = explain_text(text)
    assert answer.kind == kind, answer.summary
    if sub is not None:
        assert answer.sub_cause == sub
    if culprit is not None:
        assert (answer.culprit_rank, answer.culprit_known) == (culprit, True)
    for language in ("en", "zh"):
        assert explain_text(text, language).summary


def test_a_chain_of_consequences_is_folded_below_its_root():
    text = """\
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.00 GiB is free. Of the allocated memory 77.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated.
[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.3]:41031
[rank2]:[E1 10:10:00.1 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=90, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.
W1129 10:11:00.000000 99 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 41 closing signal SIGTERM
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
    answer = explain_text(text)
    assert (answer.kind, answer.culprit_rank) == ("oom-capacity", 1)
    assert [line.partition(" ")[0] for line in answer.consequences] == [
        "peer-gone",
        "nccl-timeout",
        "torchrun-hidden-root-cause",
    ]
    # The same whatever the order in which the ranks were heard.
    assert explain_text("\n".join(reversed(text.splitlines()))).kind == "oom-capacity"


def test_what_only_nccl_has_is_advised_only_where_nccl_timed_out():
    nccl = (
        "[rank0]:[E1 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=600000) ran for 600001 milliseconds"
    )
    waited = "[rank0]: RuntimeError: [unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
    barrier = "[rank0]: RuntimeError: Rank 5 failed to pass monitoredBarrier in 1800000 ms"
    for language in ("en", "zh"):
        answer = explain_text(nccl, language)
        advice = "\n".join([*answer.fix, *answer.confirm, *answer.avoid])
        assert all(word in advice for word in ("TORCH_FR_BUFFER_SIZE", "SeqNum", "NCCL_BLOCKING_WAIT")), advice
        for text in (waited, barrier):
            answer = explain_text(text, language)
            advice = "\n".join([*answer.cause, *answer.fix, *answer.confirm, *answer.avoid])
            assert answer.kind == "nccl-timeout" and not re.search("NCCL|SeqNum|TORCH_FR", advice), advice
            assert "monitored_barrier()" in advice and "py-spy" in advice
    ended = "  rank      : 1 (local_rank: 1)\n  exitcode  : -6 (pid: 41)"
    assert explain_text(f"distributed_backend=gloo\n{ended}").kind == "native-abort", "no watchdog ended it"
    assert explain_text(ended).sub_cause == "abort"


def test_after_a_device_assert_everything_else_is_noise():
    text = """\
Traceback (most recent call last):
  File "train.py", line 77, in step
    attention = mask.all()
RuntimeError: CUDA error: device-side assert triggered
RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`
[E ProcessGroupNCCL.cpp:916] [Rank 0] NCCL watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered
../aten/src/ATen/native/cuda/Indexing.cu:1239: indexSelectSmallIndex: block: [0,0,0], thread: [3,0,0] Assertion `srcIndex < srcSelectDimSize` failed.
"""
    answer = explain_text(text)
    assert answer.kind == "device-assert-index"
    assert "innocent" in " ".join(answer.cause)


def test_torchruns_own_sigterms_are_never_the_cause():
    text = """\
W1129 10:00:00.0 99 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 41 closing signal SIGTERM
W1129 10:00:30.0 99 torch/distributed/elastic/multiprocessing/api.py:1047] Unable to shutdown process 41 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL
E1129 10:00:31.0 99 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 3) local_rank: 1 (pid: 42) of binary: /env/bin/python
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 41)
"""
    answer = explain_text(text)
    assert (answer.kind, answer.culprit_rank) == ("torchrun-hidden-root-cause", 1)
