"""NCCL by nccl.cu: ranks as processes on one GPU, over its sockets and over us, by shared memory and by packets.

Each rank is a host of its own to NCCL (NCCL_HOSTID), else it refuses two ranks on one GPU.
"""

import os
import re
import shutil
import tempfile

from stage import JUDGES

WAYS = {"sockets": "sockets", "shared": "one address", "packets": "packets between addresses"}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "sendrecv", "alltoall")
KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 1024 * MIB)
RESULT = re.compile(r"^RESULT (\S+) (\d+) (out|in) (\d+) (\S+) (\S+) (\d+)$", re.M)
CHANNEL = re.compile(r"^.*Channel .* via NET/\S+.*$", re.M)
GOALS = {"shared": 3.0, "packets": 1.5}


def nccl_env(h, name, way, rank):
    """Returns the variables of a rank. Its log of NCCL is OUT/name-rank.nccl."""
    env = {"NCCL_HOSTID": f"host{rank}", "NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
           "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH", "NCCL_DEBUG_FILE": os.path.join(h.out, f"{name}-{rank}.nccl")}
    if way == "sockets":
        return {**env, "NCCL_NET": "Socket"}
    return {**env, "NCCL_NET": "IB", "NCCL_GIN_TYPE": "2", "NCCL_NET_GDR_LEVEL": "SYS", "VERBENA_LOG": "1",
            "VERBENA_STATS": os.path.join(h.out, f"{name}-{rank}.counters"),
            "VERBENA_ADDR": "127.77.0.1" if way == "shared" else f"127.77.0.{rank + 1}",
            "VERBENA_LINK": "udp" if way == "packets" else ""}  # addresses of one machine would share memory


class NCCL:
    def __init__(self, stage):
        self.stage = stage
        self.speeds = {}  # of an all_reduce out of place: way, ranks, bytes -> seconds, GB/s

    def program(self, h):
        header = self.stage.find("nccl.h", "nccl/include/nccl.h", "include/nccl.h")
        library = self.stage.find("libnccl.so", "nccl/lib*/libnccl.so.2", "lib*/libnccl.so.2", "lib/*/libnccl.so.2")
        return self.stage.compile_cu(h, "nccl", [os.path.join(JUDGES, "nccl.cu")], "-I", os.path.dirname(header),
                                     "-L", self.stage.linked(h, library, "libnccl.so"), "-lnccl", "-Xlinker", f"-rpath={os.path.dirname(library)}")

    def step(self, h, way, ranks):
        """One way with so many ranks: all collectives and sizes over us, over sockets what the goals need."""
        program, name = self.program(h), f"nccl-{way}-{ranks}"
        collectives = COLLECTIVES if way != "sockets" else COLLECTIVES[:1]
        sizes = [s for s in SIZES if not h.quick or s <= 64 * MIB]
        if way == "sockets":
            sizes = [s for s in sizes if s <= 64 * MIB]
        files = tempfile.mkdtemp(dir=h.out, prefix="nccl.")
        sides = []
        for rank in range(ranks):
            env = {**nccl_env(h, name, way, rank), **self.stage.mps(h)}
            command = [program, str(rank), str(ranks), os.path.join(files, "id"), ",".join(collectives), ",".join(map(str, sizes)), "5" if h.quick or h.few else "20"]
            sides.append((command if way == "sockets" else self.stage.exec(*command), env))
        rans = h.together(name, sides, h.left() - 1)
        shutil.rmtree(files, ignore_errors=True)
        for ran in rans:
            if not ran.ok():
                h.failed("a rank", ran.why())
        self.judge(h, way, ranks, collectives, sizes, [RESULT.findall(ran.text) for ran in rans])
        if way != "sockets":
            check_gdr(h, name, ranks)

    def judge(self, h, way, ranks, collectives, sizes, said):
        """Each collective is one case: every rank has to have every size, without a wrong element."""
        lines = []
        for collective in collectives:
            wanted = {(str(s), place) for s in sizes for place in (("out", "in") if collective in COLLECTIVES[:4] else ("out",))}
            missing, wrong, at = 0, 0, {}
            for rank in said:
                of = {(r[1], r[2]): r for r in rank if r[0] == collective}
                missing += len(wanted - of.keys())
                wrong += sum(int(r[6]) for r in of.values())
                for key, r in of.items():  # the slowest rank counts
                    at[key] = max(at.get(key, (0, 0)), (float(r[4]), float(r[5])))
            for (size, place), (seconds, speed) in sorted(at.items(), key=lambda kv: (int(kv[0][0]), kv[0][1])):
                lines.append(f"{collective:15} {int(size):>11} {place:3} {seconds * 1e6:>11.1f} µs {speed:>8.2f} GB/s")
                if collective == "all_reduce" and place == "out":
                    self.speeds[way, ranks, int(size)] = (seconds, speed)
            figure = f"64 MiB {at['%d' % (64 * MIB), 'out'][1]:.2f} GB/s" if (str(64 * MIB), "out") in at else ""
            if missing:
                h.failed(collective, f"{missing} of {len(wanted) * len(said)} results are missing", figure)
            elif wrong:
                h.failed(collective, f"{wrong} wrong elements", figure)
            else:
                h.passed(collective, figure)
        h.table(f"NCCL, {WAYS[way]}, {ranks} ranks, the slowest rank's time and bus bandwidth", "\n".join(lines))

    def goals(self, h):
        """An all_reduce of 64 MiB over us and over sockets."""
        self.show_speeds(h)
        for way, goal in GOALS.items():
            case, here, there = f"all_reduce 64 MiB, {WAYS[way]}", self.speeds.get((way, 2, 64 * MIB)), self.speeds.get(("sockets", 2, 64 * MIB))
            if not here or not there:
                h.skipped(case, "one of the two was not measured")
                continue
            ratio = here[1] / there[1]
            figure, want = f"{here[1]:.2f} GB/s, {ratio:.2f}× sockets' {there[1]:.2f}", f">= {goal}× sockets"
            if ratio >= goal:
                h.passed(case, figure, want)
            else:
                h.failed(case, "", figure, want)

    def show_speeds(self, h):
        sizes = sorted({size for _, _, size in self.speeds})
        lines = ["way".ljust(28) + "".join(f"{size // KIB:>14} KiB" for size in sizes)]
        for way, ranks in sorted({(w, r) for w, r, _ in self.speeds}):
            cells = [self.speeds.get((way, ranks, size)) for size in sizes]
            lines.append(f"{WAYS[way]}, {ranks} ranks".ljust(28) + "".join(
                "-".rjust(18) if c is None else f"{c[0] * 1e6:.0f} µs".rjust(18) if size <= MIB else f"{c[1]:.2f} GB/s".rjust(18) for c, size in zip(cells, sizes)))
        h.table("NCCL all_reduce, out of place: time, and from 16 MiB on bus bandwidth", "\n".join(lines))


def check_gdr(h, name, ranks, prefix=""):
    """NCCL's log has to say of every channel through the network that it goes to GPU memory itself."""
    case = prefix + "GDR in NCCL's log"
    channels, without, says = 0, [], 0
    for rank in range(ranks):
        path = os.path.join(h.out, f"{name}-{rank}.nccl")
        try:
            with open(path, errors="replace") as f:
                text = f.read()
        except OSError as err:
            h.failed(case, f"{path}: {err.strerror}")
            return
        found = CHANNEL.findall(text)
        channels += len(found)
        without += [line for line in found if "/GDRDMA" not in line]
        says += bool(re.search(r"\bGDR 1\b", text))
        with open(os.path.join(h.out, f"{name}-{rank}.gdr.txt"), "w") as f:
            f.write("\n".join(line for line in text.splitlines() if "GDR" in line or "GPU Direct" in line or "via NET/" in line) + "\n")
    figure = f"{channels - len(without)} of {channels} channels"
    if not channels:
        h.failed(case, "it names no channel via NET", figure)
    elif without:
        h.failed(case, f"a channel without GDRDMA: {without[0].strip()[-120:]}", figure)
    elif says != ranks:
        h.failed(case, f"{says} of {ranks} ranks say GDR 1", figure)
    else:
        h.passed(case, figure)
