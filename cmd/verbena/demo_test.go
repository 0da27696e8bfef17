package main

import (
	"regexp"
	"strings"
	"testing"
	"time"
)

// okLine is a step that went well.
var okLine = regexp.MustCompile(`(?m)^ok    (RC|UC|UD|--)  `)

func TestDemo(t *testing.T) {
	args := []string{"demo"}
	if testing.Short() {
		args = append(args, "--quick")
	}
	o := succeed(t, args...)
	if n := len(okLine.FindAllString(o.stdout, -1)); n != 30 {
		t.Errorf("%d steps went well, want 15 over each of two links:\n%s", n, o.stdout)
	}
	if strings.ContainsAny(o.stdout, "\x1b\r") {
		t.Error("colours or progress where there is no terminal")
	}
	if testing.Short() {
		return
	}
	if o.took > 10*time.Second && !raceEnabled {
		t.Errorf("took %v", o.took)
	}
	for _, size := range []string{"8 B", "4 KiB", "64 KiB", "1 MiB"} {
		row := regexp.MustCompile(`(?m)^ +` + size + `( +[0-9.]+){4}$`)
		if !row.MatchString(o.stdout) {
			t.Errorf("no figures for %s:\n%s", size, o.stdout)
		}
	}
}

// The tour of on-demand paging, as a person starts it.
func TestDemoODP(t *testing.T) {
	o := succeed(t, "demo", "odp")
	if !strings.Contains(o.stdout, "all 4 as they should be") || strings.ContainsAny(o.stdout, "\x1b\r") {
		t.Errorf("%s", o.stdout)
	}
}

// The disk, the GPU and the adapter together, as a person starts it.
func TestDemoUnified(t *testing.T) {
	o := succeed(t, "demo", "unified")
	if !strings.Contains(o.stdout, "all 3 as they should be") || !strings.Contains(o.stdout, "bytes on each link") || strings.ContainsAny(o.stdout, "\x1b\r") {
		t.Errorf("%s", o.stdout)
	}
}

func TestDemoTopic(t *testing.T) {
	for _, topic := range []struct {
		name  string
		steps int
		word  string
	}{{"mw", 7, "LOCAL_INV"}, {"umr", 5, "matrix transpose"}, {"dm", 6, "lock service"}, {"dmabuf", 9, "Kernel fence"}, {"gpu", 8, "KV cache"}, {"p2p", 6, "network to disk"}} {
		o := succeed(t, "demo", topic.name)
		if n := len(okLine.FindAllString(o.stdout, -1)); n != 2*topic.steps || !strings.Contains(o.stdout, topic.word) {
			t.Errorf("%s: %d steps went well, want %d over each of two links:\n%s", topic.name, n, topic.steps, o.stdout)
		}
	}
}
