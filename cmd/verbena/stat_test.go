package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/verbs"
)

// paged is a device of this process with an on-demand region of 16 pages, to
// which it can write itself.
type paged struct {
	dev    *verbs.Device
	memory []byte
	odp    *verbs.MR
	pd     *verbs.PD
	write  func(off, n int)
}

func newPaged(t *testing.T, addr string) *paged {
	t.Helper()
	fatal := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	closing := func(c interface{ Close() error }) {
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	p := &paged{}
	var err error
	p.memory, err = unix.Mmap(-1, 0, 16*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	fatal(err)
	t.Cleanup(func() { _ = unix.Munmap(p.memory) })
	p.dev, err = verbs.Open(addr, nil)
	fatal(err)
	closing(p.dev)
	pd, err := p.dev.AllocPD()
	fatal(err)
	closing(pd)
	p.pd = pd
	cq, err := p.dev.CreateCQ(16, nil)
	fatal(err)
	closing(cq)
	source, err := pd.RegMR(bytes.Repeat([]byte{7}, len(p.memory)), 0)
	fatal(err)
	closing(source)
	p.odp, err = pd.RegMR(p.memory, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessOnDemand)
	fatal(err)
	closing(p.odp)
	var qps [2]*verbs.QP
	for i := range qps {
		qps[i], err = pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1}})
		fatal(err)
		closing(qps[i])
	}
	fatal(qps[0].Connect(qps[1].Endpoint(), nil))
	fatal(qps[1].Connect(qps[0].Endpoint(), nil))
	p.write = func(off, n int) {
		t.Helper()
		_, err := qps[0].PostSend([]verbs.SendWR{{Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGL: []verbs.SGE{source.SGE(0, n)},
			RemoteAddr: p.odp.Addr() + uint64(off), RKey: p.odp.RKey()}})
		fatal(err)
		var wc [1]verbs.WC
		for k := 0; k == 0; {
			k, err = cq.Poll(wc[:])
			fatal(err)
		}
		fatal(wc[0].Err())
	}
	return p
}

// stat shows the counters of a process by the kernel's names, of its regions by
// those of rdma, and no keys.
func TestStat(t *testing.T) {
	const addr = "127.77.0.204"
	page := os.Getpagesize()
	p := newPaged(t, addr)
	p.write(0, 3*page)    // one fault, three pages
	p.write(8*page, page) // one fault, one page
	// One call, of three elements.
	if err := p.pd.AdviseMR(verbs.AdvisePrefetchWrite, verbs.AdviseFlush, p.odp.SGE(9*page, page), p.odp.SGE(10*page, page), p.odp.SGE(11*page, page)); err != nil {
		t.Fatal(err)
	}
	pid := strconv.Itoa(os.Getpid())

	out := succeed(t, "stat", addr).stdout
	for _, want := range []string{
		`(?m)^127\.77\.0\.204 pid ` + pid + ` \S+$`,
		`(?m)^ +num_page_faults +2$`, `(?m)^ +num_page_fault_pages +4$`, `(?m)^ +num_invalidations +0$`, `(?m)^ +num_invalidation_pages +0$`,
		`(?m)^ +invalidations_faults_contentions +0$`, `(?m)^ +num_prefetches_handled +1$`, `(?m)^ +num_failed_resolutions +0$`, `(?m)^ +num_mrs_not_found +0$`,
		`(?m)^ +num_odp_mrs +1$`, `(?m)^ +num_odp_mr_pages +16$`, `(?m)^ +num_local_page_faults +0$`, `(?m)^ +num_remote_page_faults +2$`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no line like %s in\n%s", want, out)
		}
	}
	if strings.Contains(out, "tx_bytes") {
		t.Error("other counters without --all")
	}
	if out := succeed(t, "stat", "--all", "--pid", pid).stdout; !strings.Contains(out, "tx_bytes") {
		t.Errorf("no tx_bytes with --all:\n%s", out)
	}
	out = succeed(t, "stat", "--mr", addr).stdout
	head := `ADDRESS +PID +MRN +KIND +LENGTH +PRESENT +page_faults +page_faults_handled +page_invalidations +page_invalidations_handled +page_prefetch +prefetches_handled +contentions +failed_resolutions +local_faults +remote_faults`
	line := `127\.77\.0\.204 +` + pid + ` +\d+ +\S+ +64\.0 KiB +7 +4 +2 +0 +0 +3 +1 +0 +0 +0 +2`
	if !regexp.MustCompile(head+`\s+`+line).MatchString(out) || strings.Count(out, "\n") != 2 {
		t.Errorf("want one line like %s:\n%s", line, out)
	}

	var list []statDevice
	text := succeed(t, "stat", "--json", "--mr", addr).stdout
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		t.Fatal(err)
	}
	if len(list) != 1 || list[0].Addr.String() != addr || len(list[0].Processes) != 1 {
		t.Fatalf("%s", text)
	}
	q := list[0].Processes[0]
	if q.PID != os.Getpid() || !q.Answered || q.Counters["num_page_fault_pages"] != 4 || len(q.MRs) != 1 || q.MRs[0].Present != 7 || q.MRs[0].Counters["page_faults_handled"] != 2 ||
		q.MRs[0].Counters["prefetches_handled"] != 1 {
		t.Errorf("%s", text)
	}
	if regexp.MustCompile(`"[lr]?key"`).MatchString(text) || strings.Contains(text, strconv.Itoa(int(p.odp.RKey()))) {
		t.Errorf("keys are told:\n%s", text)
	}
}

// With --watch there is a block for each look, and it says how fast counters grow.
func TestStatWatch(t *testing.T) {
	const addr = "127.77.0.205"
	p := newPaged(t, addr)
	cmd := exec.CommandContext(t.Context(), program, "stat", "--json", "--watch", "20ms", "--count", "3", addr)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for n := range 3 {
		var i statInterval
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &i) != nil || len(i.Devices) != 1 || len(i.Devices[0].Processes) != 1 {
			t.Fatalf("look %d: %q", n, lines.Text())
		}
		q := i.Devices[0].Processes[0]
		rate, known := q.Rates["num_page_faults"]
		if known != (n > 0) || rate < 0 || q.Counters["num_odp_mrs"] != 1 {
			t.Errorf("look %d: %s", n, lines.Text())
		}
		p.write(n*os.Getpagesize(), 1) // by the second look at the latest one was counted
		if n == 2 && q.Counters["num_page_faults"] == 0 {
			t.Errorf("look %d: %s", n, lines.Text())
		}
	}
	if lines.Scan() {
		t.Errorf("more than three: %s", lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	text := succeed(t, "stat", "--watch=10ms", "-c", "2", addr).stdout
	if strings.Count(text, addr) != 2 || strings.Contains(text, "\x1b") || !regexp.MustCompile(`num_page_faults +3 +0/s`).MatchString(text) {
		t.Errorf("want two blocks:\n%s", text)
	}
}

// An interrupt is how a watch ends.
func TestStatInterrupted(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), program, "stat", "--watch=10ms", "--json")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		t.Error("nothing is printed")
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() { // until it ends
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("exit status: %v", err)
	}
}

func TestStatNobody(t *testing.T) {
	o := verbena(t, "stat", "127.77.0.99")
	if o.code != exitFailed || !strings.Contains(o.stderr, "no process of this user has the device 127.77.0.99 open") {
		t.Errorf("status %d, %q", o.code, o.stderr)
	}
	o = verbena(t, "stat", "--pid", "1")
	if o.code != exitFailed || !strings.Contains(o.stderr, "the process id 1") {
		t.Errorf("status %d, %q", o.code, o.stderr)
	}
}

// readTree returns the files below a directory, by path.
func readTree(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		name, _ := filepath.Rel(dir, path)
		files[name] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// findUverbs returns the directory of the device at an address: others may be open as well, with the same name.
func findUverbs(t *testing.T, files map[string]string, addr string) string {
	t.Helper()
	number, ok := files[filepath.Join("kernel/debug/verbena", addr, "uverbs")]
	if !ok {
		t.Fatalf("nothing is the device at %s: %v", addr, slices.Sorted(maps.Keys(files)))
	}
	return filepath.Join("class/infiniband_verbs", strings.TrimSuffix(number, "\n"))
}

// The files are where the kernel has them, with its names, a number in each.
func TestStatFiles(t *testing.T) {
	const addr = "127.77.0.206"
	dir := filepath.Join(t.TempDir(), "run")
	t.Setenv("VERBENA_RUNTIME_DIR", dir)
	p := newPaged(t, addr)
	p.write(0, 2*os.Getpagesize())
	if out := succeed(t, "stat", "--files").stdout; out != dir+"\n" {
		t.Errorf("it says %q", out)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st, err)
	}
	files := readTree(t, dir)
	at := findUverbs(t, files, addr)
	if ok, _ := filepath.Match("class/infiniband_verbs/uverbs[0-9]*", at); !ok {
		t.Errorf("the device is in %s", at)
	}
	want := map[string]string{"ibdev": p.dev.Name(), "invalidations_faults_contentions": "0", "num_invalidation_pages": "0", "num_invalidations": "0",
		"num_page_fault_pages": "2", "num_page_faults": "1", "num_prefetches_handled": "0"}
	debug := "kernel/debug/verbena/" + addr + "/odp_stats"
	for name, value := range want {
		if files[filepath.Join(at, name)] != value+"\n" {
			t.Errorf("%s holds %q, want %q", name, files[filepath.Join(at, name)], value)
		}
	}
	for name, value := range map[string]string{"num_failed_resolutions": "0", "num_mrs_not_found": "0", "num_odp_mr_pages": "16", "num_odp_mrs": "1"} {
		if files[filepath.Join(debug, name)] != value+"\n" {
			t.Errorf("%s holds %q, want %q", name, files[filepath.Join(debug, name)], value)
		}
	}
	for name := range files {
		if base := filepath.Base(name); filepath.Dir(name) == at && want[base] == "" || base == ".new" {
			t.Errorf("a file more: %s", name)
		}
	}
}

// A writer that was killed leaves files, which the next one does not take for its
// own; two at a time are refused; one that ends leaves nothing.
func TestStatFilesWatch(t *testing.T) {
	const addr = "127.77.0.207"
	dir := t.TempDir()
	stale := filepath.Join(dir, "class/infiniband_verbs/uverbs4096/num_page_faults")
	if err := os.MkdirAll(filepath.Dir(stale), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(stale, []byte("99\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := newPaged(t, addr)
	p.write(0, 1)
	debug := filepath.Join(dir, "kernel/debug/verbena", addr, "odp_stats/num_odp_mrs")
	start := func() *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), program, "stat", "--files="+dir, "--watch=10ms")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		await(t, "the files", func() bool { _, err := os.Stat(debug); return err == nil })
		return cmd
	}
	killed := start()
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("what was there is still there: %v", err)
	}
	if o := verbena(t, "stat", "--files="+dir); o.code != exitFailed || !strings.Contains(o.stderr, "another verbena stat --files writes there") {
		t.Errorf("a second writer: status %d, %q", o.code, o.stderr)
	}
	faults := filepath.Join(dir, findUverbs(t, readTree(t, dir), addr), "num_page_faults")
	reads := func(want string) func() bool {
		return func() bool { b, err := os.ReadFile(faults); return err == nil && string(b) == want }
	}
	await(t, "one fault", reads("1\n"))
	p.write(4*os.Getpagesize(), 1)
	await(t, "two faults", reads("2\n"))
	if err := killed.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = killed.Wait()
	if _, err := os.Stat(debug); err != nil {
		t.Errorf("a killed writer removed its files: %v", err)
	}
	if err := os.Remove(debug); err != nil {
		t.Fatal(err)
	}
	next := start()
	if err := next.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := next.Wait(); err != nil {
		t.Errorf("exit status: %v", err)
	}
	if files := readTree(t, dir); len(files) != 1 || files[".lock"] != "" {
		t.Errorf("left behind: %v", files)
	}
}

// await waits for something that another process does.
func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not in 30 s", what)
		}
	}
}

// A runtime directory that others can write to, or that is none, is refused.
func TestStatFilesRefused(t *testing.T) {
	open := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o777); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	for dir, message := range map[string]string{open: "others may write to it", link: "not a directory"} {
		t.Setenv("VERBENA_RUNTIME_DIR", dir)
		if o := verbena(t, "stat", "--files"); o.code != exitFailed || !strings.Contains(o.stderr, message) {
			t.Errorf("%s: status %d, %q", dir, o.code, o.stderr)
		}
	}
}

// What processes of a device have counted stays when they end; what they had does
// not.
func TestTreeSum(t *testing.T) {
	process := func(slot, pid int, faults, mrs uint64) verbs.ProcessResources {
		return verbs.ProcessResources{Slot: slot, PID: pid, Answered: true, Paging: verbs.PagingStats{PageFaults: faults, PageFaultPages: 2 * faults, MRs: mrs, MRPages: 10 * mrs}}
	}
	silent := func(slot, pid int) verbs.ProcessResources { return verbs.ProcessResources{Slot: slot, PID: pid} }
	d := &treeDevice{}
	for i, step := range []struct {
		processes   []verbs.ProcessResources
		faults, mrs uint64
	}{
		{[]verbs.ProcessResources{process(0, 100, 5, 1)}, 5, 1},
		{[]verbs.ProcessResources{process(0, 100, 6, 1), process(1, 101, 10, 3)}, 16, 4},
		{[]verbs.ProcessResources{silent(0, 100), process(1, 101, 11, 3)}, 17, 4}, // stopped: as before
		{[]verbs.ProcessResources{process(1, 101, 11, 3)}, 17, 3},                 // the first has ended
		{[]verbs.ProcessResources{process(1, 101, 4, 1)}, 21, 1},                  // another with the same numbers
		{[]verbs.ProcessResources{process(1, 101, 4, 1), process(2, 101, 1, 0)}, 22, 1},
		{nil, 22, 0},
	} {
		if s := d.sum(step.processes); s.PageFaults != step.faults || s.PageFaultPages != 2*step.faults || s.MRs != step.mrs || s.MRPages != 10*step.mrs {
			t.Errorf("step %d: %+v", i, s)
		}
	}
}

// Devices keep their numbers while they are open, and free ones are used again.
func TestTreeNumbers(t *testing.T) {
	dir := t.TempDir()
	tr, err := openTree(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tr.close(); err != nil {
			t.Error(err)
		}
	}()
	for i, step := range []struct{ open, want string }{
		{"1 2 3", "1=0 2=1 3=2"}, {"1 3", "1=0 3=2"}, {"1 3 4", "1=0 3=2 4=1"}, {"3", "3=2"}, {"", ""},
	} {
		var devices []verbs.DeviceResources
		for _, f := range strings.Fields(step.open) {
			devices = append(devices, verbs.DeviceResources{Addr: netip.MustParseAddr("10.0.0." + f), Processes: []verbs.ProcessResources{{Answered: true, Device: f}}})
		}
		if err := tr.update(devices); err != nil {
			t.Fatal(err)
		}
		var got []string
		for name, text := range readTree(t, dir) {
			if filepath.Base(name) == "ibdev" {
				got = append(got, strings.TrimSpace(text)+"="+strings.TrimPrefix(filepath.Base(filepath.Dir(name)), "uverbs"))
			}
		}
		slices.Sort(got)
		if strings.Join(got, " ") != step.want {
			t.Errorf("step %d: %v, want %s", i, got, step.want)
		}
	}
	if left := readTree(t, filepath.Join(dir, "kernel")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestRates(t *testing.T) {
	at := time.Now()
	addr := netip.MustParseAddr("10.0.0.1")
	look := func(seconds int, faults uint64, before *snapshot) *snapshot {
		return &snapshot{at.Add(time.Duration(seconds) * time.Second), []verbs.DeviceResources{{Addr: addr, Processes: []verbs.ProcessResources{
			{PID: 1, Answered: true, Paging: verbs.PagingStats{PageFaults: faults, MRs: faults}}}}}, before}
	}
	a := look(0, 10, nil)
	b := look(2, 50, a)
	c := look(3, 5, b) // another process
	for _, tt := range []struct {
		s    *snapshot
		want string
	}{{a, "0 false"}, {b, "20 true"}, {c, "5 true"}} {
		p := &tt.s.devices[0].Processes[0]
		rate, ok := tt.s.rates(false).of(addr, p, -1, counter{name: "num_page_faults", value: p.Paging.PageFaults})
		if got := fmt.Sprint(rate, ok); got != tt.want {
			t.Errorf("%s, want %s", got, tt.want)
		}
	}
	if _, ok := b.rates(false).of(addr, &b.devices[0].Processes[0], -1, counter{name: "num_odp_mrs", value: 50, now: true}); ok {
		t.Error("what there is now has a rate")
	}
}
