"""What the steps stand on: what the machine has, found and named; compiled programs; CUDA's MPS daemon.

Packages are found by asking Python where it would import them from. What is not found is said, with where it was
looked for, and a step that needs it is skipped with that reason.
"""

import glob
import json
import os
import re
import shutil
import subprocess
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
JUDGES = os.path.join(HERE, "judges")  # programs that the steps compile and run

# Asked of the Python that has torch: where the parts of a package "nvidia" may lie, and versions.
PLACES = """
import importlib.util, json, sys
places = []
for name in ("nvidia", "nvidia.nccl", "nvidia.nvshmem", "nvshmem"):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None:
        places += list(spec.submodule_search_locations or [])
print(json.dumps({"python": sys.version.split()[0], "places": places}))
"""
VERSIONS = """
import json
import torch
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(),
                  "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""}))
"""


class Missing(Exception):
    """Something that a step needs and the machine does not have: the step is skipped."""


class Stage:
    def __init__(self, opts):
        self.bin, self.python, self.quick = os.path.abspath(opts.bin), opts.python, opts.quick
        self.places, self.torch, self.arch, self.gpu_pci = [], None, "", ""
        self.mps_dir, self.mps_env = "", {}
        self.built = {}

    # Begin and end of a run.

    def begin(self, h):
        """Finds out what is here. Without a GPU or without our programs nothing can be run."""
        smi = shutil.which("nvidia-smi")
        ran = h.run("nvidia-smi", [smi or "nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total,pci.bus_id", "--format=csv,noheader"], 30)
        card = [c.strip() for c in ran.text.strip().splitlines()[0].split(",")] if ran.ok() and ran.text.strip() else []
        if len(card) < 5:
            raise SystemExit(f"cuda-test needs a machine with an NVIDIA GPU and its driver, and this is none: {ran.why()}")
        h.facts.update({"card": f"{card[0]}, {card[3]}", "driver": card[1], "processors": os.cpu_count(), "kernel": os.uname().release})
        self.arch = "sm_" + card[2].replace(".", "")
        self.gpu_pci = card[4].lower()[-len("0000:00:00.0"):]  # the domain has eight digits here, and four in sysfs
        for path in (self.verbena(), os.path.join(self.bin, "lib", "libibverbs.so.1"), os.path.join(self.bin, "lib", "libverbena-backend.so")):
            if not os.path.exists(path):
                raise SystemExit(f"{path} is missing: make build clib, here or on another machine, and --bin")
        nvcc = self.nvcc()
        if nvcc:
            release = re.search(r"release ([\d.]+)", h.run("nvcc", [nvcc, "--version"], 30).text)
            h.facts["CUDA toolkit"] = release.group(1) if release else "unknown"
        else:
            h.note("nvcc was not found, neither by PATH nor under CUDA_HOME or /usr/local/cuda*")
        self.ask_python(h)
        h.run("processors", ["lscpu"], 10)
        h.run("verbena", [self.verbena(), "exec", "--", "ibv_devinfo"] if shutil.which("ibv_devinfo") else [self.verbena(), "--help"], 20)

    def ask_python(self, h):
        said = last_json(h.run("python-places", [self.python, "-c", PLACES], 30))
        if said is None:
            h.note(f"{self.python} does not say where packages are")
        else:
            self.places = list(dict.fromkeys(said["places"]))
            h.facts["Python"] = said["python"]
        self.torch = last_json(h.run("python-versions", [self.python, "-c", VERSIONS], 90))
        if self.torch is None:
            h.note("PyTorch was not found: see python-versions.log")
        else:
            h.facts.update({"torch": self.torch["torch"], "NCCL": self.torch["nccl"]})

    def end(self, h):
        self.stop_mps(h)

    # Where things are.

    def verbena(self):
        return os.path.join(self.bin, "verbena")

    def exec(self, *args):
        """Returns the command that runs a program on the drop-in library."""
        return [self.verbena(), "exec", "--", *args]

    def homes(self):
        return [d for d in [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), *sorted(glob.glob("/usr/local/cuda*"))] if d]

    def nvcc(self):
        return shutil.which("nvcc") or next((p for d in self.homes() if os.path.exists(p := os.path.join(d, "bin", "nvcc"))), None)

    def cuda_include(self):
        for d in self.homes():
            for sub in ("include", "targets/x86_64-linux/include"):
                if os.path.exists(os.path.join(d, sub, "cuda.h")):
                    return os.path.join(d, sub)
        raise Missing(f"cuda.h was not found under {' '.join(self.homes()) or 'any CUDA_HOME'}")

    def libcuda(self):
        """Returns the directory of a libcuda.so to link with: CUDA's stub, or the driver's own."""
        for d in self.homes():
            for sub in ("lib64/stubs", "targets/x86_64-linux/lib/stubs", "lib/stubs"):
                if os.path.exists(os.path.join(d, sub, "libcuda.so")):
                    return os.path.join(d, sub)
        out = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
        for path in re.findall(r"libcuda\.so(?:\.1)? .*=> (\S+)", out) + glob.glob("/usr/local/nvidia/lib64/libcuda.so*"):
            return os.path.dirname(path)
        raise Missing("libcuda.so was found neither under CUDA's stubs nor by ldconfig")

    def find(self, name, *patterns):
        """Returns the first file below Python's packages, or in the system's directories, that fits a pattern."""
        roots = self.places + [os.path.dirname(p) for p in self.places] + ["/usr", "/usr/local", "/opt"]
        for root in roots:
            for pattern in patterns:
                for path in sorted(glob.glob(os.path.join(root, pattern))):
                    return path
        raise Missing(f"{name} was not found: no {' or '.join(patterns)} under {' '.join(roots)}")

    def linked(self, h, library, name):
        """Returns a directory in which a library, whose file has a version behind its name, has the name for linking."""
        where = os.path.join(h.out, "programs", "links")
        os.makedirs(where, exist_ok=True)
        link = os.path.join(where, name)
        if os.path.lexists(link):
            os.remove(link)
        os.symlink(library, link)
        return where

    # Compiling.

    def gcc(self, h, name, sources, *flags):
        return self.compile(h, name, ["gcc", "-std=gnu11", "-O2", "-g", "-Wall", "-I", self.cuda_include(), *sources], flags)

    def compile_cu(self, h, name, sources, *flags):
        nvcc = self.nvcc()
        if not nvcc:
            raise Missing("nvcc was not found")
        return self.compile(h, name, [nvcc, "-O2", "-std=c++17", f"-arch={self.arch}", *sources], flags)

    def compile(self, h, name, command, flags):
        if name not in self.built:
            out = os.path.join(h.out, "programs", name)
            os.makedirs(os.path.dirname(out), exist_ok=True)
            ran = h.run("compile-" + name, [*command, "-o", out, *flags], 120)
            if not ran.ok():
                raise RuntimeError("it does not compile: " + ran.why())
            self.built[name] = out
        return self.built[name]

    def verbs_flags(self):
        return ["-L", os.path.join(self.bin, "lib"), "-libverbs", "-L", self.libcuda(), "-lcuda", "-lpthread", "-ldl"]

    # MPS: without it two processes take turns on the card, some milliseconds each.

    def mps(self, h):
        """Starts the daemon if it does not run, and returns the variables of its clients."""
        if self.mps_env:
            return self.mps_env
        control = shutil.which("nvidia-cuda-mps-control")
        if not control:
            raise Missing("nvidia-cuda-mps-control was not found by PATH")
        self.mps_dir = tempfile.mkdtemp(prefix="mps.")  # short: it has sockets
        env = {"CUDA_MPS_PIPE_DIRECTORY": self.mps_dir, "CUDA_MPS_LOG_DIRECTORY": self.mps_dir}
        ran = self.quiet([control, "-d"], env)
        if ran != 0:
            self.stop_mps(h, env)
            raise Missing(f"nvidia-cuda-mps-control -d exits with {ran}")
        self.mps_env = env
        h.note(f"MPS runs, in {self.mps_dir}")
        return env

    def quiet(self, args, env, text=None, limit=20):
        with open(os.path.join(self.mps_dir, "harness.out"), "ab") as out:
            try:
                return subprocess.run(args, env={**os.environ, **env}, input=text, stdin=None if text else subprocess.DEVNULL,
                                      stdout=out, stderr=out, timeout=limit, check=False).returncode
            except (OSError, subprocess.TimeoutExpired) as err:
                return str(err)

    def stop_mps(self, h, env=None):
        """Ends the daemon that mps has started, and no other one: by its pipe, or else by the id it has written there."""
        env, self.mps_env = env or self.mps_env, {}
        if not self.mps_dir or not env:
            return
        pids = []
        for path in glob.glob(os.path.join(self.mps_dir, "*.pid")):
            with open(path) as f:
                pids += [int(w) for w in f.read().split() if w.isdigit()]
        self.quiet(["nvidia-cuda-mps-control"], env, b"quit -t 5\n")
        until = time.monotonic() + 10
        while any(is_mps(p) for p in pids) and time.monotonic() < until:
            time.sleep(0.1)
        for p in pids:
            if is_mps(p):
                h.note(f"MPS {p} does not end by itself")
                os.kill(p, 9)
        for path in glob.glob(os.path.join(self.mps_dir, "*")):
            if os.path.isfile(path) and os.path.getsize(path) < 1 << 20:
                shutil.copy(path, os.path.join(h.out, "mps-" + os.path.basename(path)))
        shutil.rmtree(self.mps_dir, ignore_errors=True)
        self.mps_dir = ""
        h.note("MPS has ended")


def is_mps(pid):
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().startswith("nvidia-cuda-mps")
    except OSError:
        return False


def last_json(ran):
    """Returns what the last line of a program says, or None."""
    lines = ran.text.strip().splitlines()
    try:
        return json.loads(lines[-1]) if ran.ok() and lines else None
    except ValueError:
        return None
