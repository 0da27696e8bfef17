"""The steps of run.py, in the order in which they matter, and how each is judged.

    locks                          what calls of the driver wait for, without us
    memory, faults, order, gin     programs of our own, on GPU memory
    go                             the tests of package gpu/cuda
    speed                          the same, with MPS
    nccl-*                         NCCL by nccl.cu, over sockets and over us; its logs have to say GDR
    torch-*                        PyTorch
    nvshmem, ucx, perftest         other programs
"""

import glob
import os
import re
import shutil
import socket
import tempfile

from harness import Step, listens, take_lines
from ncclsteps import NCCL, WAYS, check_gdr, nccl_env
from standstill import dump, late_calls
from stage import HERE, JUDGES, Missing, Stage

__all__ = ["Stage", "steps"]

PERFTEST = os.path.join(os.path.dirname(os.path.dirname(HERE)), ".bin", "perftest")
ONE, TWO = ("127.77.0.1", "127.77.0.1"), ("127.77.0.1", "127.77.0.2")
PLACES = (("one address", ONE), ("two addresses", TWO))

# The steps of "--slot", in their order: what is not known yet, or was changed since it was seen on a GPU.
SLOT = ("locks", "torch-ddp", "speed", "nccl-sockets-2", "nccl-shared-2", "nccl-packets-2", "nccl-goals", "faults", "memory", "order", "torch-collectives")


def steps(stage, slot=False):
    """Returns all steps, or those of SLOT. What a step needs and does not find makes it one result: SKIP, with what was looked for."""
    nccl = NCCL(stage)

    def step(name, limit, run, *args):
        def guarded(h):
            try:
                run(h, *args)
            except Missing as err:
                h.skipped(name, str(err))
            except RuntimeError as err:
                h.failed(name, str(err))
        return Step(name, guarded, limit)

    every = [
        step("locks", 90, locks, stage),
        step("memory", 120, own, stage, "memory"),
        step("faults", 120, own, stage, "faults"),
        step("order", 120, own, stage, "order"),
        step("gin", 60, gin, stage),
        step("go", 60, go, stage),
        step("speed", 120, own, stage, "speed"),
        *[step(f"nccl-{way}-{ranks}", limit, nccl.step, way, ranks)
          for way, ranks, limit in (("sockets", 2, 60), ("shared", 2, 90), ("packets", 2, 90), ("shared", 4, 90), ("packets", 4, 90))],
        step("nccl-goals", 10, nccl.goals),
        step("torch-collectives", 90, torch_ranks, stage, "torch_collectives", (("shared", 2), ("packets", 2), ("shared", 4))),
        step("torch-ddp", 150, torch_ddp, stage),
        step("torch-graph", 60, torch_ranks, stage, "torch_graph", (("shared", 2), ("packets", 2))),
        step("torch-register", 60, torch_register, stage),
        step("nvshmem", 120, nvshmem, stage),
        step("ucx", 60, ucx, stage),
        step("perftest", 120, perftest, stage),
    ]
    return [next(s for s in every if s.name == name) for name in SLOT] if slot else every


# Programs of our own.


def own(h, stage, name):
    """Compiles and runs a program of testdata. What it prints beside its results is kept for the summary."""
    source = next((p for p in (os.path.join(HERE, "testdata", name + ext) for ext in (".c", ".cu")) if os.path.exists(p)), None)
    if source is None:
        raise Missing(f"testdata has no {name}.c and no {name}.cu")
    flags = ["-I", os.path.join(HERE, "../../clib/include"), "-lmlx5", *stage.verbs_flags()]
    parts = []  # C, also for a program that nvcc compiles
    for part in ("runner", "kinds", "node", "pattern"):
        parts.append(stage.gcc(h, part + ".o", ["-c", os.path.join(HERE, "testdata", part + ".c")], "-I", os.path.join(HERE, "../../clib/include")))
    if source.endswith(".cu"):
        program = stage.compile_cu(h, name, [source, *parts], "-I", os.path.dirname(source), *flags)
    else:
        program = stage.gcc(h, name, [source, *parts], *flags, "-lm")
    env = {"VERBENA_ADDR": ONE[0], "VERBENA_STATS": os.path.join(h.out, f"{name}-counters.txt")}
    if name != "faults":  # a process that is killed may leave the daemon unusable
        env.update(stage.mps(h))
    ran = h.run(name, stage.exec(program), h.left(), env)
    take_lines(h, ran)
    rest = "\n".join(line for line in ran.text.splitlines() if not line.startswith(("PASS ", "FAIL ", "SKIP ")))
    if rest.strip():
        h.table(name, rest)


def locks(h, stage):
    """Asks the driver itself, without us, which of the calls that we make wait for kernels of the program's."""
    program = stage.compile_cu(h, "locks", [os.path.join(JUDGES, "locks.cu")], "-L", stage.libcuda(), "-lcuda")
    ran = h.run("locks", [program], h.left(), {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "16", **stage.mps(h)})
    take_lines(h, ran)
    h.table("calls that are not before or behind each copy, beside a kernel", "\n".join(line for line in ran.text.splitlines() if line.startswith("NOTE ")))


def gin(h, stage):
    program = stage.gcc(h, "gin", [os.path.join(JUDGES, "gin.c")], *stage.verbs_flags())
    for place, addresses in PLACES:
        for way in ("address", "dmabuf"):
            files = tempfile.mkdtemp(dir=h.out, prefix="gin.")
            sides = [(stage.exec(program, str(r), files, way), {"VERBENA_ADDR": a, "VERBENA_LOG": "1"}) for r, a in enumerate(addresses)]
            for ran in h.together(f"gin-{place.replace(' ', '-')}-{way}", sides, 30):
                take_lines(h, ran, f"{place}, by {way}: ")
            shutil.rmtree(files, ignore_errors=True)


GO_TEST = re.compile(r"^ *--- (PASS|FAIL|SKIP): (\S+)", re.M)


def go(h, stage):
    """Runs the tests of package gpu/cuda, built by "make cuda-test" where there is Go, or carried in bin."""
    program = os.path.join(stage.bin, "gpu-cuda.test")
    if not os.path.exists(program):
        raise Missing(f"{program}: go test -tags cuda -c -o bin/gpu-cuda.test ./gpu/cuda")
    ran = h.run("go", [program, "-test.v"], h.left(), {"VERBENA_ADDR": ONE[0]})
    told = GO_TEST.findall(ran.text)
    for verdict, case in told:
        {"PASS": h.passed, "SKIP": lambda c: h.skipped(c, "see its log"), "FAIL": lambda c: h.failed(c, "see its log")}[verdict](case)
    if not told or not ran.ok() and not any(v == "FAIL" for v, _ in told):
        h.failed("the program", ran.why())


# PyTorch.


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def torch_sides(h, stage, script, way, ranks, args=(), more=None):
    if not stage.torch:
        raise Missing("PyTorch was not found: see python-versions.log")
    port, sides = free_port(), []
    for rank in range(ranks):
        env = nccl_env(h, f"{script}-{way}-{ranks}", way, rank)
        env.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                    "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", **stage.mps(h), **(more or {})})
        command = [stage.python, os.path.join(JUDGES, script + ".py"), *args]
        sides.append((command if way == "sockets" else stage.exec(*command), env))
    return sides


def torch_ranks(h, stage, script, cases):
    args = (str((1 if h.quick else 64) << 20),) if script == "torch_collectives" else ()
    for way, ranks in cases:
        name = f"{WAYS[way]}, {ranks} ranks"
        if h.left() < 5:
            h.skipped(name, "no time left")
            continue
        for ran in h.together(f"{script}-{way}-{ranks}", torch_sides(h, stage, script, way, ranks, args), 60):
            take_lines(h, ran, name + ": ")
        check_gdr(h, f"{script}-{way}-{ranks}", ranks, name + ": ")


def torch_ddp(h, stage):
    """The losses over us equal those over sockets, to the last digit."""
    losses = {}
    for way in WAYS:
        name = f"torch_ddp-{way}-2"
        rans = h.together(name, torch_sides(h, stage, "torch_ddp", way, 2, ("30",)), 30, stuck=lambda groups, name=name: dump(h, name, groups, stage.homes()))
        for ran in rans:
            take_lines(h, ran, WAYS[way] + ": ")
            for line in late_calls(ran.text):
                h.failed(f"{WAYS[way]}: calls of the driver", line)
        if any(ran.late for ran in rans):
            stage.stop_mps(h)  # its clients were killed: the next ones get another one
        losses[way] = [[line for line in ran.text.splitlines() if line.startswith(("LOSS ", "WEIGHTS "))] for ran in rans]
        seconds = [line.split()[1] for ran in rans for line in ran.text.splitlines() if line.startswith("SECONDS ")]
        if way == "sockets":
            continue
        case = f"{WAYS[way]}: losses are those over sockets"
        if len(losses["sockets"][0]) != 31:
            h.failed(case, f"over sockets there are {len(losses['sockets'][0])} of 31 lines")
        elif losses[way] == losses["sockets"]:
            h.passed(case, f"{max(seconds)} s" if seconds else "")
        else:
            differs = next((a for a, b in zip(losses[way][0], losses["sockets"][0]) if a != b), "the number of lines")
            h.failed(case, f"the first that differs: {differs}")


def torch_register(h, stage):
    if not stage.torch:
        raise Missing("PyTorch was not found: see python-versions.log")
    reach = stage.gcc(h, "reach.so", [os.path.join(JUDGES, "reach.c")], "-shared", "-fPIC", *stage.verbs_flags())
    for conf in ("expandable_segments:False", "expandable_segments:True"):
        env = {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf, "VERBENA_ADDR": ONE[0], "VERBENA_LOG": "1",
               "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        take_lines(h, h.run("torch_register", stage.exec(stage.python, os.path.join(JUDGES, "torch_register.py"), reach), 60, env))


# Other programs.


def library_path(first):
    return os.pathsep.join(p for p in (first, os.environ.get("LD_LIBRARY_PATH")) if p)


def nvshmem(h, stage):
    """Compiles nvshmem.cu, with kernels if the package has the library for them, and runs it on the transport ibrc.

    That MPS has to give each process its part, and which variables the transport reads, is known from its sources, and
    that the package has plugins beside its library is a guess: what is found is in nvshmem-package.log.
    """
    header = stage.find("nvshmem.h", "nvshmem/include/nvshmem.h", "include/nvshmem.h", "include/nvshmem*/nvshmem.h")
    library = stage.find("libnvshmem_host", "nvshmem/lib*/libnvshmem_host.so*", "lib*/libnvshmem_host.so*", "lib/*/libnvshmem_host.so*",
                         "lib/*/nvshmem/*/libnvshmem_host.so*")
    where = os.path.dirname(library)
    listing = h.log("nvshmem-package")
    with open(listing, "w") as f:
        f.write("\n".join([header, library, *sorted(glob.glob(os.path.join(where, "*")))]) + "\n")
    if not glob.glob(os.path.join(where, "nvshmem_transport_ibrc.so*")):
        raise Missing(f"the package in {where} has no nvshmem_transport_ibrc.so")
    flags = ["-I", os.path.dirname(header), "-L", stage.linked(h, library, "libnvshmem_host.so"), "-lnvshmem_host", "-Xlinker", f"-rpath={where}",
             "-L", stage.libcuda(), "-lcuda"]
    program = with_kernels(h, stage, where, flags)
    if not program:  # as C++ of the host alone
        program = stage.compile_cu(h, "nvshmem-host", ["-x", "c++", os.path.join(JUDGES, "nvshmem.cu")], *flags)
    for place, addresses in PLACES:
        for heap in ("0", "1"):
            files = tempfile.mkdtemp(dir=h.out, prefix="nvshmem.")
            sides = []
            for rank, address in enumerate(addresses):
                env = {"NVSHMEM_REMOTE_TRANSPORT": "ibrc", "NVSHMEM_DISABLE_P2P": "1", "NVSHMEM_HCA_PREFIX": "verbena", "NVSHMEM_DISABLE_NVLS": "1",
                       "NVSHMEM_DISABLE_CUDA_VMM": heap, "NVSHMEM_SYMMETRIC_SIZE": "64M", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
                       "NVSHMEM_DEBUG": "INFO", "NVSHMEM_DISABLE_GDRCOPY": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
                       "VERBENA_ADDR": address, "VERBENA_LOG": "1", "VERBENA_PCI": stage.gpu_pci,  # without a place it has no transport
                       "LD_LIBRARY_PATH": library_path(where), **stage.mps(h)}
                if rank == 0:
                    env["VERBENA_STATS"] = os.path.join(h.out, "nvshmem-counters.txt")
                sides.append((stage.exec(program, str(rank), "2", os.path.join(files, "id")), env))
            kind = "cudaMalloc" if heap == "1" else "VMM"
            for ran in h.together(f"nvshmem-{place.replace(' ', '-')}-{kind}", sides, 30):
                take_lines(h, ran, f"{place}, heap by {kind}: ")
            shutil.rmtree(files, ignore_errors=True)


def with_kernels(h, stage, where, flags):
    """Compiles nvshmem.cu with its kernels, and says so if that cannot be done."""
    if not os.path.exists(os.path.join(where, "libnvshmem_device.a")):
        h.skipped("kernels", f"the package in {where} has no libnvshmem_device.a")
        return None
    try:
        return stage.compile_cu(h, "nvshmem", [os.path.join(JUDGES, "nvshmem.cu")], "-DKERNELS", "-rdc=true", *flags, "-L", where, "-lnvshmem_device")
    except RuntimeError as err:
        h.failed("kernels", str(err))
        return None


def ucx(h, stage):
    tool, more_env = shutil.which("ucx_perftest"), {}
    if not tool:
        carried = os.path.join(PERFTEST, "ucx")
        tool = os.path.join(carried, "bin", "ucx_perftest")
        if not os.path.exists(tool):
            raise Missing("ucx_perftest was not found by PATH; interop/cuda/perftest.sh fetch copies it")
        more_env = {"LD_LIBRARY_PATH": library_path(os.path.join(carried, "lib")), "UCX_MODULE_DIR": os.path.join(carried, "lib", "ucx")}
    info = h.run("ucx_info", stage.exec(os.path.join(os.path.dirname(tool), "ucx_info"), "-v", "-d"), 20, {"VERBENA_ADDR": ONE[0], **more_env})
    version = next((line for line in info.text.splitlines() if "ersion" in line), "")
    h.facts["UCX"] = version.strip("# ").replace("Library version: ", "") or "unknown"
    if "rc_verbs" not in info.text:
        h.failed("rc_verbs", "ucx_info -d does not list it: " + info.why())
        return
    memories = [("host memory", [], "rc_verbs,ud_verbs:aux")]
    if "cuda_copy" in info.text:
        memories.append(("cuda memory", ["-m", "cuda"], "rc_verbs,ud_verbs:aux,cuda_copy"))
    else:
        h.skipped("cuda memory", "ucx_info -d lists no cuda_copy: this UCX has no modules for CUDA")
    for memory, more, tls in memories:
        for test in ("tag_bw", "tag_lat", "ucp_put_bw", "ucp_get", "ucp_fadd"):
            if test == "ucp_fadd" and more:
                continue  # UCX does atomics on the host's memory only
            for place, addresses in PLACES:
                command = [tool, "-t", test, "-s", "8" if test == "ucp_fadd" else "65536", "-n", "500", "-w", "20", *more]
                pair(h, stage, f"{memory}, {test}, {place}", [tool], command, addresses,
                     {"UCX_TLS": tls, "UCX_NET_DEVICES": "verbena0:1", **more_env}, "Final:")


def pair(h, stage, case, server, client, addresses, env, says):
    """Runs a server and a client of a tool that takes -p for its port and the server's name last."""
    if h.left() < 4:
        h.skipped(case, "no time left")
        return
    port = free_port()
    sides = [(stage.exec(*server, "-p", port), {**env, "VERBENA_ADDR": addresses[0]}),
             (stage.exec(*client, "-p", port, "127.0.0.1"), {**env, "VERBENA_ADDR": addresses[1]})]
    rans = h.together("".join(c if c.isalnum() else "-" for c in f"{h.step}-{case}"), sides, 20, ready=lambda: listens(int(port)))
    bad = [ran for ran in rans if not ran.ok()]
    if bad:
        h.failed(case, bad[-1].why())
    elif says not in rans[1].text:
        h.failed(case, f"the client does not say {says!r}: {rans[1].why()}")
    else:
        h.passed(case, figure(rans[1].text))


def figure(text):
    """Returns the last line of figures that a tool prints."""
    for line in reversed(text.splitlines()):
        words = line.split()
        if len(words) > 3 and words[0].rstrip(":").replace("Final", "0").isdigit():
            return " ".join(words)
    return ""


def perftest(h, stage):
    """Runs the perftest that interop/cuda/perftest.sh has carried or built. It has no ib_write_lat on GPU memory."""
    script = os.path.join(HERE, "perftest.sh")
    if not os.path.isdir(PERFTEST):
        raise Missing("no .bin/perftest: interop/cuda/perftest.sh fetch makes it, on a machine with a network")
    built = os.path.join(h.out, "perftest")
    ran = h.run("perftest-build", ["bash", script, "build", built, stage.cuda_include(), stage.libcuda()], 90)
    if not ran.ok():
        h.failed("build", ran.why())
        return
    env = {"LD_LIBRARY_PATH": library_path(os.path.join(built, "lib")), **stage.mps(h)}
    for tool in ("ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_read_lat", "ib_send_lat"):
        for dmabuf in ((), ("--use_cuda_dmabuf",)):
            for place, addresses in PLACES:
                size = "8" if tool.endswith("lat") else "1048576"
                command = [os.path.join(built, tool), "-F", "-n", "1000", "-s", size, "--use_cuda=0", *dmabuf]
                says = "using DMA-BUF" if dmabuf else "#bytes"
                pair(h, stage, f"{tool}, {'dma-buf' if dmabuf else 'address'}, {place}", command, command, addresses, env, says)
