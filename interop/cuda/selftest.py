"""Tests of the judges in ncclsteps.py and steps.py, on made-up results and logs. harness_test.go runs them."""

import os
import socket
import sys
import tempfile
import time
import types
import unittest

sys.dont_write_bytecode = True

import standstill
import steps
from answers import answers
from harness import FAIL, PASS, SKIP, Harness, Ran, listens, take_lines
from ncclsteps import COLLECTIVES, MIB, NCCL, SIZES, check_gdr
from stage import Missing, Stage

GDR = """host0:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
host0:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
host0:1:2 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory()
        self.addCleanup(self.dir.cleanup)
        self.h = Harness(self.dir.name, 60)
        self.h.note = lambda text: None
        self.addCleanup(self.h.journal.close)

    def verdicts(self):
        return {r.case: r.verdict for r in self.h.results}


def results(collectives=COLLECTIVES, speed=5.0, wrong=0):
    """Returns what a rank says of some collectives."""
    return [(c, str(s), place, "2", "0.001", str(speed), str(wrong)) for c in collectives for s in SIZES
            for place in (("out", "in") if c in COLLECTIVES[:4] else ("out",))]


class Results(Case):
    def judge(self, *said, way="shared"):
        nccl = NCCL(None)
        nccl.judge(self.h, way, 2, COLLECTIVES, SIZES, list(said))
        return nccl

    def test_all_right(self):
        self.judge(results(), results())
        self.assertEqual(self.verdicts(), dict.fromkeys(COLLECTIVES, PASS))

    def test_wrong_elements_of_one_rank(self):
        bad = results()
        bad[0] = bad[0][:6] + ("1",)
        self.judge(results(), bad)
        self.assertEqual(self.verdicts(), {**dict.fromkeys(COLLECTIVES, PASS), "all_reduce": FAIL})

    def test_a_size_is_missing(self):
        self.judge(results(), [r for r in results() if (r[0], r[1], r[2]) != ("broadcast", str(MIB), "in")])
        self.assertEqual(self.verdicts()["broadcast"], FAIL)

    def test_a_rank_says_nothing(self):
        self.judge(results(), [])
        self.assertEqual(set(self.verdicts().values()), {FAIL})

    def test_the_slowest_rank_counts(self):
        slow = [(c, s, p, k, "0.002", "2.5", w) for c, s, p, k, _, _, w in results()]
        nccl = self.judge(results(), slow)
        self.assertEqual(nccl.speeds["shared", 2, 64 * MIB], (0.002, 2.5))


class Goals(Case):
    def goals(self, **speeds):
        nccl = NCCL(None)
        nccl.speeds = {(way, 2, 64 * MIB): (0.01, speed) for way, speed in speeds.items()}
        nccl.goals(self.h)
        return [r.verdict for r in self.h.results]

    def test_reached(self):
        self.assertEqual(self.goals(sockets=2.0, shared=6.0, packets=3.0), [PASS, PASS])

    def test_missed(self):
        self.assertEqual(self.goals(sockets=2.0, shared=5.9, packets=2.9), [FAIL, FAIL])

    def test_not_measured(self):
        self.assertEqual(self.goals(shared=6.0, packets=3.0), [SKIP, SKIP])


class Logs(Case):
    def gdr(self, *texts):
        for i, text in enumerate(texts):
            with open(os.path.join(self.h.out, f"n-{i}.nccl"), "w") as f:
                f.write(text)
        check_gdr(self.h, "n", 2)
        return self.h.results[0].verdict

    def test_gdr(self):
        self.assertEqual(self.gdr(GDR, GDR), PASS)

    def test_one_channel_by_the_host(self):
        self.assertEqual(self.gdr(GDR, GDR.replace("/GDRDMA", "", 1)), FAIL)

    def test_no_channels(self):
        self.assertEqual(self.gdr("GDR 1", "GDR 1"), FAIL)

    def test_gdr_0(self):
        self.assertEqual(self.gdr(GDR, GDR.replace("GDR 1", "GDR 0")), FAIL)

    def test_no_log(self):
        self.assertEqual(self.gdr(GDR), FAIL)


class Losses(Case):
    def ddp(self, **texts):
        """texts are what rank 0 prints over each way."""
        def together(name, sides, limit, stuck):
            return [Ran([], 0, False, texts[name.split("-")[1]], "log", 1.0)] * 2
        self.h.together = together
        stage = types.SimpleNamespace(torch={"torch": "2"}, mps=lambda h: {}, python="python3", exec=lambda *a: list(a))
        steps.torch_ddp(self.h, stage)
        return [r.verdict for r in self.h.results if "losses" in r.case]

    def text(self, last="0x1.8p+0"):
        return "".join(f"LOSS {i} 0x1.0p+1\n" for i in range(29)) + f"LOSS 29 {last}\nWEIGHTS 0x1.2p+3\nSECONDS 0.5\nPASS the loss falls, rank 0\n"

    def test_equal(self):
        self.assertEqual(self.ddp(sockets=self.text(), shared=self.text(), packets=self.text()), [PASS, PASS])

    def test_the_last_digit(self):
        self.assertEqual(self.ddp(sockets=self.text(), shared=self.text("0x1.8000000000001p+0"), packets=self.text()), [FAIL, PASS])

    def test_none_are_not_equal(self):
        self.assertEqual(self.ddp(sockets="", shared="", packets=""), [FAIL, FAIL])


class Standstill(Case):
    def test_ddp(self):
        """Ranks that stand still: what they do is written, the call that the library names is a result, and MPS starts again."""
        program = os.path.join(self.h.out, "rank")
        with open(program, "w") as f:
            f.write("#!/bin/sh\necho 'LOSS 0 0x1.0p+1'\n" + 'echo "WARN verbena: a call of CUDA\'s driver does not return: x calls=cuX(0x1)"\nexec sleep 1000\n')
        os.chmod(program, 0o755)
        stopped = []
        stage = types.SimpleNamespace(torch={"torch": "2"}, mps=lambda h: {}, python=program, exec=lambda *a: list(a), homes=lambda: [], stop_mps=stopped.append)
        self.h.step_end = time.monotonic() + 2
        steps.torch_ddp(self.h, stage)
        verdicts = self.verdicts()
        self.assertEqual(verdicts["one address: calls of the driver"], FAIL)
        self.assertEqual(verdicts["one address: losses are those over sockets"], FAIL)
        self.assertEqual(len(stopped), 3)
        with open(os.path.join(self.h.out, "torch_ddp-shared-2-stuck.txt")) as f:
            self.assertEqual(f.read().count("== "), 2)


class Slot(Case):
    def test_steps(self):
        stage = Stage(types.SimpleNamespace(bin="none", python="python3", quick=False))
        self.assertEqual([s.name for s in steps.steps(stage, True)], list(steps.SLOT))

    def test_nothing_was_run(self):
        text = answers(self.h)
        self.assertIn("DistributedDataParallel: not run", text)
        self.assertIn("calls that wait for a kernel: not run", text)
        self.assertIn("GPU to GPU, of a copy: not run", text)

    def test_answers(self):
        self.h.step = "torch-ddp"
        self.h.failed("one address: losses are those over sockets", "over us there are 0 lines")
        self.h.failed("one address: calls of the driver", "a call of CUDA's driver does not return calls=cuX(0x1)")
        self.h.step = "locks"
        self.h.passed("event alone, beside cuCtxSynchronize", "0.5 us")
        self.h.failed("within the GPU, 1 MiB, beside cuCtxSynchronize", "THE CALL WAITS for the kernel")
        self.h.table("calls that are not before or behind each copy, beside a kernel",
                     "NOTE cuA, beside cuCtxSynchronize: 1.0 us\nNOTE cuB, beside cuCtxSynchronize: THE CALL WAITS for the kernel")
        self.h.step = "speed"
        self.h.failed("goal/two/gpu/WRITE/256Mi", "0.85 of cuMemcpy, wanted at least 0.9")
        self.h.passed("goal/one/malloc/READ/64Mi", "2.20 times cuMemcpy from pageable memory, wanted at least 2.0")
        self.h.failed("goal/one/locked/WRITE/8", "4.00 us more than a synchronous copy, wanted at most 2.0")
        self.h.table("speed", "one  gpu     -> gpu  WRITE 256Mi x2      186.79 us  1437.09 GB/s   copy    134.70 us  1992.84 GB/s   0.72")
        text = answers(self.h)
        for want in ("one address: losses are those over sockets: FAIL", "calls=cuX(0x1)", "of those beside each copy: within the GPU, 1 MiB; of others: cuB\n",
                     "two/gpu/WRITE/256Mi FAIL 0.85 of cuMemcpy (before", "one/malloc/READ/64Mi PASS 2.20 times", "one/locked/WRITE/8 FAIL 4.00 us more", "one WRITE 256Mi 0.72 (before"):
            self.assertIn(want, text)

    def test_standstill(self):
        """A program that is late is looked at before it is ended."""
        self.h.together("slow", [(["sleep", "1000"], {})], 0.5, stuck=lambda groups: standstill.dump(self.h, "slow", groups))
        with open(os.path.join(self.h.out, "slow-stuck.txt")) as f:
            text = f.read()
        self.assertIn("sleep 1000", text)
        self.assertRegex(text, r"\d+ sleep +\S+ +(\d+ 0x|running)")

    def test_late_calls(self):
        line = "WARN verbena: a call of CUDA's driver does not return: x calls=cuEventQuery(0x1, 0x0, 0x0, 0x0) for 6s"
        self.assertEqual(standstill.late_calls("a\n" + line + "\nb\n"), [line])


class Others(Case):
    def test_missing_is_skipped(self):
        stage = Stage(types.SimpleNamespace(bin="none", python="python3", quick=False))

        def missing(*args):
            raise Missing("no such thing")
        stage.find = stage.cuda_include = stage.mps = missing
        for s in steps.steps(stage):
            if s.name.startswith("nccl-s") or s.name in ("gin", "torch-ddp", "torch-register", "nvshmem"):
                self.h.run_step(s)
        self.assertEqual({r.verdict for r in self.h.results}, {SKIP})
        self.assertEqual(len(self.h.results), 7)
        self.assertFalse(self.h.verdict())

    def test_a_broken_step_fails_alone(self):
        self.h.run_step(types.SimpleNamespace(name="broken", run=lambda h: 1 / 0, limit=5, least=1))
        self.h.run_step(types.SimpleNamespace(name="idle", run=lambda h: None, limit=5, least=1))
        self.assertEqual(self.verdicts(), {"broken": FAIL, "idle": FAIL})

    def test_an_earlier_run_is_forgotten(self):
        with open(os.path.join(self.h.out, "n-0.nccl"), "w") as f:
            f.write(GDR)
        again = Harness(self.h.out, 60)
        again.journal.close()
        self.assertFalse(os.path.exists(os.path.join(self.h.out, "n-0.nccl")))

    def test_one_side_fails(self):
        """The other side has a short time to end, not all of it."""
        began = time.monotonic()
        rans = self.h.together("sides", [(["sh", "-c", "exit 3"], {}), (["sleep", "1000"], {})], 50, grace=0.5)
        self.assertEqual([(r.rc != 0, r.late) for r in rans], [(True, False), (True, True)])
        self.assertLess(time.monotonic() - began, 20)

    def test_a_client_waits_for_its_server(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        serve = f"import socket, time; time.sleep(0.5); s = socket.create_server(('127.0.0.1', {port})); s.accept(); print('PASS served')"
        call = f"import socket; socket.create_connection(('127.0.0.1', {port})); print('PASS called')"
        rans = self.h.together("pair", [([sys.executable, "-c", serve], {}), ([sys.executable, "-c", call], {})], 50, ready=lambda: listens(port))
        for ran in rans:
            take_lines(self.h, ran)
        self.assertEqual(self.verdicts(), {"served": PASS, "called": PASS})

    def test_a_server_that_fails_has_no_client(self):
        rans = self.h.together("pair", [(["false"], {}), (["true"], {})], 20, ready=lambda: False)
        self.assertEqual([r.ok() for r in rans], [False])

    def test_no_such_program(self):
        take_lines(self.h, self.h.run("nothing", ["/no/such/program"], 5))
        self.assertEqual(self.verdicts(), {"the program": FAIL})
        self.assertIn("No such file", self.h.results[0].why)

    def test_figures_of_tools(self):
        self.assertEqual(steps.figure("#bytes x\n 1048576    1000  2919.61 1811.40 0.0018\n-----\n"), "1048576 1000 2919.61 1811.40 0.0018")
        self.assertEqual(steps.figure("Final:  500 0.068 305.9 305.9\n"), "Final: 500 0.068 305.9 305.9")
        self.assertEqual(steps.figure("nothing of that kind"), "")


if __name__ == "__main__":
    unittest.main()
