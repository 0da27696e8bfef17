package main

// Tests of packages that skip what a usual host's kernel does not have: here it has the modules.

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const testsLimit = 15 * time.Minute

func packageTests() (rows []*testCase) {
	for _, c := range []struct{ name, file, run string }{
		{"dmabuf/kernel/kinds", "dmabuftest.test", "."},
		{"dmabuf/kernel/exported", "dmabuf.test", "^TestKernelFD"},
		{"dmabuf/kernel/gpu", "gpu.test", "^TestKernelFD$"},
		{"dmabuf/kernel/conformance", "mem.test", "^TestConformanceOfKernelDMABufs$"},
	} {
		rows = append(rows, &testCase{name: c.name + "/v4/we", family: "v4", limit: testsLimit, run: func(*scene) error { return runTests(c.file, c.run) }})
	}
	return rows
}

// runTests runs compiled tests. They have passed if none was skipped.
func runTests(file, run string) error {
	ctx, cancel := context.WithTimeout(context.Background(), testsLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(wholeDir, file), "-test.v", "-test.run", run).CombinedOutput()
	text := string(out)
	switch {
	case err != nil || !strings.Contains(text, "--- PASS: "):
		return fmt.Errorf("%s: %w\n%s", file, err, text[max(0, len(text)-4000):])
	case strings.Contains(text, "--- SKIP: "):
		return skipError(file + " skips tests:\n" + text[max(0, len(text)-1000):])
	}
	return nil
}
