// Package settings reads the environment variables that configure the C library: its
// programs have no other way to do so. "verbena env --help" shows the table of them.
package settings

import (
	"fmt"
	"math"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// Var is an environment variable.
type Var struct {
	Name    string
	Default string // in words: the value if it is not set
	Help    string
}

// Vars lists the variables, in the order in which they are shown.
var Vars = []Var{
	{"VERBENA_ADDR", "every interface's own", "Addresses that devices stand on: those of one device separated by commas, devices by semicolons. They are called verbena0, verbena1, …"},
	{"VERBENA_NAME", "verbena", "What devices are called, in front of their number: some programs look at the name (mlx5_). Letters, digits, _ and -, at most 32."},
	{"VERBENA_DEVICES", "all, loopback only if there is no other", "Names of devices or network interfaces, separated by commas: what programs see, in this order."},
	{"VERBENA_LINK", "any", "How requests travel: any, loop (within the process), local (within the host), udp (packets only)."},
	{"VERBENA_LOCK", "off", "Whether registered memory is locked: off, auto (where the limit allows it), strict (its pages are held, also after munmap; registration fails if they can neither be held nor locked)."},
	{"VERBENA_WINDOW", "by the socket buffer", "Packets that a queue pair may have under way to a peer."},
	{"VERBENA_RECEIVERS", "half as many as processors", "Receivers, each with a socket of its own, that connected queue pairs are spread over: 1 to 8."},
	{"VERBENA_LIMITS", "the device's own", "Lower limits, as qp=16,cq=8: of qp, cq, mr, mw, pd, ah, srq, qp_wr, cqe, srq_wr."},
	{"VERBENA_HIDE", "nothing", "Capabilities that the device does not report, separated by commas: odp, xrc, mw, atomic, flush, atomic_write, srq, dmabuf, rereg_dmabuf (registering dma-bufs again)."},
	{"VERBENA_IDENTITY", "verbena", "The vendor that the device reports: verbena, or mlx5 (its vendor ID, and mlx5's own verbs for memory keys and queue pairs)."},
	{"VERBENA_DM_SIZE", "256M", "How much device memory there is: bytes, or with K, M or G behind the number."},
	{"VERBENA_DMABUF", "dynamic", "Whether dma-bufs may move while they are registered: dynamic (yes), pinned (they are held in place)."},
	{"VERBENA_DMABUF_STORM", "no storm", "Moves the process's dma-bufs at random, to test programs: SEED,RATE for so many events a second; SEED,RATE,N to revoke one in N."},
	{"VERBENA_DRM", "amdgpu, where no real node is", "The graphics device that \"verbena exec\" shows as /dev/dri/renderD128 and card0, for programs that make dma-bufs with one: amdgpu or i915 (also in the place of a real one), off."},
	{"VERBENA_PEER_MEM", "none", "Shared objects with PeerDirect clients (verbena/peer_mem.h), separated by colons: they are asked for addresses that are no memory of the program."},
	{"VERBENA_GPU", "count=1,vram=1G,bar=full", "The software GPUs that \"verbena exec --gpu\" shows: how many (1 to 64), and of each the bytes of VRAM and those that the CPU and other devices reach (bar: full, or a power of two), with K, M or G behind the number."},
	{"VERBENA_CUDA", "memory of the driver's libcuda is registered", "How memory of CUDA is registered if the program has loaded libcuda, words separated by commas: peermem (programs see /sys/module/nvidia_peermem/version, by which some find that addresses can be registered), off (only memory of software GPUs is), driver (software GPUs' libcuda is used as that of the driver is, to test this)."},
	{"VERBENA_PCI", "no PCI device", "The PCI devices that programs under \"verbena exec\" take devices for, one for each device in the order of their numbers, separated by commas, as 0000:1b:00.0: realpath of /sys/class/infiniband/verbena0/device is its directory. Some programs look for the device that is closest to a GPU there."},
	{"VERBENA_SCATTER_TO_CQE", "that of MLX5_SCATTER_TO_CQE, or 1", "Whether messages and results of up to 64 bytes are kept with their completions, and written when these are polled (inline receive): 0 no, 1 or 2 yes."},
	{"VERBENA_PCAP", "no capture", "A file that packets are written to; %p becomes the process ID."},
	{"VERBENA_STATS", "no statistics", "A file that the device's counters are appended to when the program closes the device or ends, or stderr; %p as above."},
	{"VERBENA_LOG", "0", "1: print on standard error why a verb failed."},
	{"VERBENA_WATCHER", "set by \"verbena exec\"", "The socket of the process that tells peers when this program has died: a name; off: \"verbena exec\" starts none."},
	{"VERBENA_BACKEND", "beside libibverbs.so.1", "The path of libverbena-backend.so."},
}

// Settings are the values of the variables.
type Settings struct {
	Addrs     [][]netip.Addr // one list for each device; nil: those of the interfaces
	Devices   []string       // nil: all
	Name      string         // what devices are called, in front of their number
	Link      string         // "" for any
	Lock      string         // "off", "auto" or "strict"
	Window    int
	Receivers int // 0: by the number of processors
	Limits    map[string]int
	Hide      map[string]bool
	CUDA      map[string]bool
	DMABuf    string // "dynamic" or "pinned"
	Identity  string // "verbena" or "mlx5"
	PCAP      string
	Stats     string
	Log       bool
	GPU       GPU
}

// GPU is what software GPUs are like.
type GPU struct {
	Count     int
	VRAM, BAR uint64 // bytes; BAR 0: all
}

// LimitNames are the keys of VERBENA_LIMITS.
var LimitNames = []string{"qp", "cq", "mr", "mw", "pd", "ah", "srq", "qp_wr", "cqe", "srq_wr"}

// HideNames are the words of VERBENA_HIDE.
var HideNames = []string{"odp", "xrc", "mw", "atomic", "flush", "atomic_write", "srq", "dmabuf", "rereg_dmabuf"}

// CUDANames are the words of VERBENA_CUDA.
var CUDANames = []string{"peermem", "off", "driver"}

// DefaultName is what devices are called.
const DefaultName = "verbena"

// pciForm is a PCI device's address; NVIDIA's tools print eight digits of the domain.
var pciForm = regexp.MustCompile(`^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]$`)

var nameForm = regexp.MustCompile(`^[A-Za-z0-9_-]{1,32}$`)

// validStorm reports whether package dmabuf understands a value of VERBENA_DMABUF_STORM.
func validStorm(text string) bool {
	parts := strings.Split(text, ",")
	if len(parts) != 2 && len(parts) != 3 {
		return false
	}
	_, err := strconv.ParseUint(parts[0], 0, 64)
	rate, wrong := strconv.Atoi(parts[1])
	valid := err == nil && wrong == nil && rate >= 1 && rate <= 100_000
	if len(parts) == 3 {
		n, err := strconv.Atoi(parts[2])
		valid = valid && err == nil && n >= 1
	}
	return valid
}

// Parse reads the variables by getenv, for the process pid. The error names all wrong
// values; the settings are valid all the same, as if those variables were not set.
func Parse(getenv func(string) string, pid int) (*Settings, error) {
	s := &Settings{Lock: "off", DMABuf: "dynamic", Identity: "verbena", Name: DefaultName, GPU: GPU{Count: 1, VRAM: 1 << 30}}
	var wrong []string
	refuse := func(name, why string) { wrong = append(wrong, fmt.Sprintf("%s=%q: %s", name, getenv(name), why)) }
	oneOf := func(name string, to *string, words ...string) {
		v := getenv(name)
		for _, w := range words {
			if v == w {
				*to = v
				return
			}
		}
		if v != "" {
			refuse(name, "it is one of "+strings.Join(words, ", "))
		}
	}
	for _, dev := range split(getenv("VERBENA_ADDR"), ";") {
		var addrs []netip.Addr
		for _, text := range split(dev, ",") {
			a, err := netip.ParseAddr(text)
			if err != nil {
				refuse("VERBENA_ADDR", fmt.Sprintf("%q is not an IP address", text))
				continue
			}
			addrs = append(addrs, a.Unmap())
		}
		if len(addrs) > 0 {
			s.Addrs = append(s.Addrs, addrs)
		}
	}
	s.Devices = split(getenv("VERBENA_DEVICES"), ",")
	if name := getenv("VERBENA_NAME"); nameForm.MatchString(name) {
		s.Name = name
	} else if name != "" {
		refuse("VERBENA_NAME", "it has 1 to 32 letters, digits, _ and -")
	}
	oneOf("VERBENA_LINK", &s.Link, "any", "loop", "local", "udp")
	if s.Link == "any" {
		s.Link = ""
	}
	oneOf("VERBENA_LOCK", &s.Lock, "off", "auto", "strict")
	oneOf("VERBENA_DMABUF", &s.DMABuf, "dynamic", "pinned")
	oneOf("VERBENA_IDENTITY", &s.Identity, "verbena", "mlx5")
	number := func(name string, n *int, most int, rule string) {
		v := getenv(name)
		if v == "" {
			return
		}
		got, err := strconv.Atoi(v)
		if err != nil || got < 1 || got > most {
			refuse(name, rule)
			return
		}
		*n = got
	}
	number("VERBENA_WINDOW", &s.Window, math.MaxInt, "it is a number from 1 on")
	number("VERBENA_RECEIVERS", &s.Receivers, 8, "it is a number from 1 to 8")
	// The device and its memory read these themselves. Values that they would not understand are
	// refused here.
	if v := getenv("VERBENA_DMABUF_STORM"); v != "" && !validStorm(v) {
		refuse("VERBENA_DMABUF_STORM", "it is a seed and a rate up to 100000, as 1,100, and perhaps a third number")
	}
	if v := getenv("VERBENA_DM_SIZE"); v != "" {
		if _, ok := size(v); !ok {
			refuse("VERBENA_DM_SIZE", "it is a number of bytes, or one with K, M or G behind it")
		}
	}
	for _, part := range split(getenv("VERBENA_GPU"), ",") {
		if !s.GPU.set(strings.Cut(part, "=")) {
			refuse("VERBENA_GPU", fmt.Sprintf("%q is none of count=2, vram=4G, bar=256M, bar=full", part))
		}
	}
	for _, addr := range split(getenv("VERBENA_PCI"), ",") { // clib/front/sysfs.c reads it
		if !pciForm.MatchString(addr) {
			refuse("VERBENA_PCI", fmt.Sprintf("%q is not the address of a PCI device, as 0000:1b:00.0", addr))
		}
	}
	var ignored string
	oneOf("VERBENA_SCATTER_TO_CQE", &ignored, "0", "1", "2")
	oneOf("VERBENA_DRM", &ignored, "amdgpu", "i915", "off")
	s.Limits = map[string]int{}
	for _, part := range split(getenv("VERBENA_LIMITS"), ",") {
		name, value, _ := strings.Cut(part, "=")
		n, err := strconv.Atoi(value)
		if !contains(LimitNames, name) || err != nil || n < 1 {
			refuse("VERBENA_LIMITS", fmt.Sprintf("%q is not a limit, as qp=16; those of %s", part, strings.Join(LimitNames, ", ")))
			continue
		}
		s.Limits[name] = n
	}
	setOf := func(name string, words []string) map[string]bool {
		set := map[string]bool{}
		for _, word := range split(getenv(name), ",") {
			if !contains(words, word) {
				refuse(name, fmt.Sprintf("%q is none of %s", word, strings.Join(words, ", ")))
				continue
			}
			set[word] = true
		}
		return set
	}
	s.Hide, s.CUDA = setOf("VERBENA_HIDE", HideNames), setOf("VERBENA_CUDA", CUDANames)
	withPID := func(name string) string { return strings.ReplaceAll(getenv(name), "%p", strconv.Itoa(pid)) }
	s.PCAP, s.Stats = withPID("VERBENA_PCAP"), withPID("VERBENA_STATS")
	s.Log = getenv("VERBENA_LOG") == "1"
	if wrong != nil {
		return s, fmt.Errorf("%s", strings.Join(wrong, "; "))
	}
	return s, nil
}

// set changes one property of the GPUs. It reports whether there is such a one, with such a value.
func (g *GPU) set(name, value string, _ bool) bool {
	n, ok := size(value)
	switch {
	case name == "count" && ok && n >= 1 && n <= 64:
		g.Count = int(n)
	case name == "vram" && ok && n >= 1<<20 && n <= 1<<40:
		g.VRAM = n
	case name == "bar" && value == "full":
		g.BAR = 0
	case name == "bar" && ok && n >= 1<<20 && n&(n-1) == 0:
		g.BAR = n
	default:
		return false
	}
	return true
}

// size returns a number of bytes, which may have K, M or G behind it.
func size(v string) (uint64, bool) {
	digits := strings.TrimRight(v, "KMG")
	n, err := strconv.ParseUint(digits, 10, 63)
	shift := map[string]int{"": 0, "K": 10, "M": 20, "G": 30}[v[len(digits):]]
	if err != nil || len(v)-len(digits) > 1 || n > math.MaxInt64>>shift {
		return 0, false
	}
	return n << shift, true
}

// split returns the words of a list without empty ones.
func split(list, sep string) (words []string) {
	for _, w := range strings.Split(list, sep) {
		if w = strings.TrimSpace(w); w != "" {
			words = append(words, w)
		}
	}
	return words
}

func contains(list []string, word string) bool {
	for _, w := range list {
		if w == word {
			return true
		}
	}
	return false
}
