package main

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/p2p"
)

const server = "../../p2p/testdata/server"

// This machine is shown, whatever it has.
func TestTopoHere(t *testing.T) {
	out := succeed(t, "topo").stdout
	if !strings.Contains(out, "rules of Linux") || !strings.Contains(out, "host bridge pci") && !strings.Contains(out, "no PCI devices") {
		t.Errorf("it prints:\n%s", out)
	}
}

func TestTopoWithoutDevices(t *testing.T) {
	file := filepath.Join(t.TempDir(), "empty.json")
	if err := os.WriteFile(file, []byte(`{"cpu":{},"host_bridges":[],"functions":[]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	want := "CPU not known, IOMMU off, rules of Linux 7.2\nThis machine has no PCI devices.\n"
	if out := succeed(t, "topo", "--from", file, "--svg", file+".svg").stdout; out != want {
		t.Errorf("it prints:\n%s", out)
	}
	checkPicture(t, file+".svg", 0)
}

func TestTopoServer(t *testing.T) {
	out := succeed(t, "topo", "--from", server).stdout
	for _, want := range []string{
		`(?m)^CPU GenuineIntel family 0x6 model 0x6a, IOMMU on, rules of Linux 7\.2$`,
		`(?m)^host bridge pci0000:80, NUMA node 1$`,
		`(?m)^│     │  └─ 0000:06:00\.0 nvme0; endpoint \[1344:51c3\]; BAR 2: 256\.0 MiB; p2pmem: 256\.0 MiB, published; IOMMU group 9$`,
		`(?m)^│  └─ 0000:81:00\.0; upstream port \[1000:c030\]; bus 82-87; IOMMU group 16$`,
		`(?m)^NVLink between 0000:03:00\.0 card0 and 0000:83:00\.0 card2: 300 GB/s in each direction$`,
		`(?m)^ +1 0000:03:00\.0 card0 +0 +4 +4 +4 +4 +6h +8h +8h +8h +8h +6h$`,
		`(?m)^ +7 0000:83:00\.0 card2 +8h +8h +8h +8h +8h +6h +0 +4h +4h +4h +6h$`,
		`(?m)^bus address, distance 4: below the common upstream port 0000:01:00\.0, and no ACS redirect is on the way\n    1-2 1-3 1-4 1-5 2-3 2-4 2-5 3-4 3-5 4-5$`,
		`ACS redirect at downstream port 0000:82:00\.0 \(request redirect, completion redirect\) and downstream port 0000:82:01\.0`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no line like %s in\n%s", want, out)
		}
	}
	out = succeed(t, "topo", "--from", server, "--kernel", "6.12", "nvme1", "0000:03:00.0").stdout
	if !strings.Contains(out, "rules of Linux 6.12") || !regexp.MustCompile(`(?m)^ +1 0000:86:00\.0 nvme1 +0 +8h$`).MatchString(out) {
		t.Errorf("two devices:\n%s", out)
	}
}

// The virtual machines that a kernel was asked in: the switch, and another root port.
func TestTopoMachines(t *testing.T) {
	for cpu, want := range map[string]string{"max": "-", "epyc": "6h"} {
		out := succeed(t, "topo", "--from", "../../p2p/testdata/q35-"+cpu, "03:00.0", "04:00.0", "05:00.0", "06:00.0").stdout
		if !regexp.MustCompile(`(?m)^ +1 0000:03:00\.0 nvme\d +0 +4 +(` + want + `) +(` + want + `)$`).MatchString(out) {
			t.Errorf("%s:\n%s", cpu, out)
		}
	}
}

// topologyJSON is what --json prints.
type topologyJSON struct {
	Machine  p2p.Spec `json:"machine"`
	Verdicts []struct {
		Provider, Client p2p.Address
		Map              string
		Distance         int
		Reason           string
	} `json:"verdicts"`
}

func TestTopoJSON(t *testing.T) {
	out := succeed(t, "topo", "--from", server, "--json").stdout
	var got topologyJSON
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	top, err := p2p.New(got.Machine)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Verdicts) != 11*11 {
		t.Errorf("%d verdicts", len(got.Verdicts))
	}
	for _, v := range got.Verdicts {
		if want := top.Verdict(v.Provider, v.Client); v.Map != want.Map.String() || v.Distance != want.Distance || v.Reason != want.Reason {
			t.Errorf("%+v, want %+v", v, want)
		}
	}
	file := filepath.Join(t.TempDir(), "machine.json")
	machine, err := json.Marshal(got.Machine)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, machine, 0o600); err != nil {
		t.Fatal(err)
	}
	if again := succeed(t, "topo", "--from", file, "--json").stdout; again != out {
		t.Error("the machine is another one when its JSON is read")
	}
}

// A dump of a machine is that machine.
func TestTopoDump(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dump")
	want := succeed(t, "topo", "--from", server, "--dump", dir).stdout
	if got := succeed(t, "topo", "--from", dir).stdout; got != want {
		t.Errorf("the dump is\n%s", got)
	}
}

func TestTopoSVG(t *testing.T) {
	file := filepath.Join(t.TempDir(), "machine.svg")
	succeed(t, "topo", "--from", server, "--svg", file)
	checkPicture(t, file, 31) // 29 functions, 2 host bridges
}

// rect is a rectangle of a picture.
type rect struct {
	Class               string `xml:"class,attr"`
	X, Y, Width, Height int
}

// checkPicture wants a well-formed picture with so many boxes, none of which overlaps another, leaves
// the picture, or has a text that is longer than it.
func checkPicture(t *testing.T, file string, boxes int) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	dec := xml.NewDecoder(strings.NewReader(string(b)))
	var all []rect
	var whole rect
	var texts int
	var text strings.Builder
	var at rect
	for {
		token, err := dec.Token()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			r := rect{}
			for _, a := range token.Attr {
				for name, to := range map[string]*int{"x": &r.X, "y": &r.Y, "width": &r.Width, "height": &r.Height} {
					if a.Name.Local == name {
						if _, err := fmt.Sscan(a.Value, to); err != nil {
							t.Fatal(err)
						}
					}
				}
				if a.Name.Local == "class" {
					r.Class = a.Value
				}
			}
			switch token.Name.Local {
			case "svg":
				whole = r
			case "rect":
				if r.Class == "box" {
					all = append(all, r)
				}
				if r.X < 0 || r.Y < 0 || r.X+r.Width > whole.Width || r.Y+r.Height > whole.Height {
					t.Errorf("%+v is outside the picture, %+v", r, whole)
				}
			case "text":
				text.Reset()
				at = r
			}
		case xml.CharData:
			text.Write(token)
		case xml.EndElement:
			if token.Name.Local != "text" {
				continue
			}
			texts++
			if n := len([]rune(text.String())); at.X < 0 || at.X > whole.Width || at.Y > whole.Height || n == 0 || n*charWidth > whole.Width {
				t.Errorf("%q at %+v", text.String(), at)
			}
			for _, box := range all {
				if at.X == box.X+box.Width/2 && at.Y > box.Y && at.Y < box.Y+box.Height && len([]rune(text.String()))*charWidth > box.Width {
					t.Errorf("%q is longer than its box", text.String())
				}
			}
		}
	}
	if len(all) != boxes || texts == 0 {
		t.Errorf("%d boxes, %d texts; want %d boxes", len(all), texts, boxes)
	}
	for i, a := range all {
		for _, b := range all[:i] {
			if a.X < b.X+b.Width && b.X < a.X+a.Width && a.Y < b.Y+b.Height && b.Y < a.Y+a.Height {
				t.Errorf("%+v and %+v overlap", a, b)
			}
		}
	}
}

// The output in docs/p2p.md is what the command prints. A line with … stands for lines that are left
// out.
func TestTopoDocument(t *testing.T) {
	doc, err := os.ReadFile("../../docs/p2p.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("(?s)```\n\\$ verbena ([^\n]*)\n(.*?)```\n").FindAllStringSubmatch(string(doc), -1)
	if len(found) != 3 {
		t.Fatalf("%d commands with output, want 3", len(found))
	}
	for _, m := range found {
		rest := succeed(t, strings.Fields(strings.ReplaceAll(m[1], "p2p/testdata", "../../p2p/testdata"))...).stdout
		parts := strings.Split(m[2], "…\n")
		for i, part := range parts {
			at := strings.Index(rest, part)
			if at < 0 || i == 0 && at != 0 || i == len(parts)-1 && rest[at:] != part {
				t.Errorf("verbena %s does not print\n%s", m[1], part)
				break
			}
			rest = rest[at+len(part):]
		}
	}
}
