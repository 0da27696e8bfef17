package cuda

// The harness on a machine that seems to have a GPU, with programs in the place of the driver's: MPS is started for
// its clients and is over afterwards, however the run ends.

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// fakes are the programs. MPS is a shell with the daemon's name, whose pipe directory the clients are to have, too.
var fakes = map[string]string{
	"nvidia-smi": `echo "A GPU, 580.1, 9.0, 1000 MiB, 00000000:1B:00.0"`,
	"nvidia-cuda-mps-control": `cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -d ]; then
  setsid python3 -c 'import time; open("/proc/self/comm", "w").write("nvidia-cuda-mps"); open("up", "w").close(); time.sleep(600)' >/dev/null 2>&1 &
  echo $! >control.pid
  cp control.pid "$FAKES/mps.pid"
  while ! [ -e up ]; do sleep 0.01; done
elif [ -z "$STUBBORN" ]; then
  read -r quit && [ "$quit" = "quit -t 5" ] && kill "$(cat control.pid)"
fi`,
	"nvcc": `while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
[ -z "$out" ] || { cp "$FAKES/rank" "$out"; }`,
	"python": `case "$2" in *find_spec*) echo "{\"python\": \"3\", \"places\": [\"$FAKES\"]}" ;; *) exit 1 ;; esac`,
	"rank": `[ -d "$CUDA_MPS_PIPE_DIRECTORY" ] || exit 1
[ -z "$HANG" ] || { touch "$FAKES/hangs"; sleep 1000; }
for s in $(echo "$5" | tr , ' '); do for p in out in; do echo "RESULT all_reduce $s $p 2 0.001 4.0 0"; done; done`,
}

// withFakes starts the harness's step of NCCL's sockets with fakes in the place of the driver's programs.
func withFakes(t *testing.T, ctx context.Context, env ...string) (cmd *exec.Cmd, dir string, out *strings.Builder) {
	t.Helper()
	dir = t.TempDir()
	files := map[string]string{"include/nccl.h": "", "lib/libnccl.so.2": "", "bin/verbena": "", "bin/lib/libibverbs.so.1": "", "bin/lib/libverbena-backend.so": ""}
	for name, script := range fakes {
		files[name] = "#!/bin/sh\n" + script + "\n"
	}
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)); err != nil { //nolint:gosec // programs
			t.Fatal(err)
		}
	}
	cmd = exec.CommandContext(ctx, "python3", "-B", "run.py", "--only", "nccl-sockets", "--bin", dir+"/bin", "--out", dir+"/out", "--python", dir+"/python")
	cmd.Env = append(os.Environ(), append(env, "FAKES="+dir, "PATH="+dir+":"+os.Getenv("PATH"), "TMPDIR="+t.TempDir())...)
	out = new(strings.Builder)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, dir, out
}

// wantMPSOver checks that the daemon was started and does not run any more.
func wantMPSOver(t *testing.T, dir, out string) {
	t.Helper()
	pid, err := os.ReadFile(dir + "/mps.pid")
	if err != nil {
		t.Fatalf("MPS was not started: %v\n%s", err, out)
	}
	var stat []byte
	for range 1000 { // one that was killed ends when it gets a processor
		stat, err = os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/stat")
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("MPS runs: %s\n%s", stat, out)
}

func TestMPSEnds(t *testing.T) {
	for name, env := range map[string]string{"when it is told to": "", "when it does not heed that": "STUBBORN=1"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			cmd, dir, out := withFakes(t, ctx, env)
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			wantTableRow(t, out.String(), "nccl-sockets-2", "all_reduce", "PASS", "64 MiB 4.00 GB/s")
			wantMPSOver(t, dir, out.String())
		})
	}
}

// A run that is ended from outside ends its processes and MPS, and says what it has.
func TestMPSEndsWithTheRun(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd, dir, out := withFakes(t, ctx, "HANG=1")
	for ctx.Err() == nil {
		if _, err := os.Stat(dir + "/hangs"); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	exit := new(exec.ExitError)
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("%v\n%s", err, out)
	}
	wantTableRow(t, out.String(), "the run", "whole", "FAIL", "ended by SIGTERM")
	wantMPSOver(t, dir, out.String())
}
