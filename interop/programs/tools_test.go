package programs

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// ibv_devices and ibv_devinfo show the devices and their attributes.
func TestDevinfo(t *testing.T) {
	program(t, "ibv_devinfo", "ibverbs-utils")
	env := []string{"VERBENA_ADDR=" + address() + ";" + address()}
	out := run(t, side{args: []string{"ibv_devices"}, env: env})
	if !strings.Contains(out, "verbena0") || !strings.Contains(out, "verbena1") {
		t.Errorf("ibv_devices shows\n%s", out)
	}
	out = run(t, side{args: []string{"ibv_devinfo", "-v", "-d", "verbena1"}, env: env})
	for _, want := range []string{`hca_id:\s+verbena1`, `state:\s+PORT_ACTIVE`, `link_layer:\s+Ethernet`, `ODP_SUPPORT_IMPLICIT`,
		`MEM_WINDOW_TYPE_2B`, `GID\[ *0\]:\s+::ffff:127\.78\.\S+, RoCE v2`, `device memory`} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("ibv_devinfo does not show %q:\n%s", want, out)
		}
	}
	out = run(t, side{args: []string{"ibv_devinfo", "-v", "-d", "verbena0"},
		env: append(env, "VERBENA_HIDE=odp,xrc", "VERBENA_LIMITS=qp=17", "VERBENA_IDENTITY=mlx5")})
	for _, want := range []string{`max_qp:\s+17\n`, `vendor_id:\s+0x02c9`} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("ibv_devinfo does not show %q:\n%s", want, out)
		}
	}
	if strings.Contains(out, "ODP_SUPPORT") || strings.Contains(out, "XRC\n") {
		t.Errorf("ibv_devinfo shows what is hidden:\n%s", out)
	}
}

// What the newest perftest does with --use_ib_dm_dmabuf, which no Debian release has yet: memory of one device,
// used by another one.
func TestDMOfAnotherDevice(t *testing.T) {
	exe := compile(t, "dmpair")
	for _, link := range []string{"local", "udp"} {
		for _, op := range []string{"write", "read", "send"} {
			t.Run(link+" "+op, func(t *testing.T) {
				out := run(t, side{args: []string{exe, op}, env: []string{"VERBENA_ADDR=" + address() + ";" + address(), "VERBENA_LINK=" + link}})
				if !strings.HasSuffix(out, "ok\n") {
					t.Errorf("it says\n%s", out)
				}
			})
		}
	}
}

// The pingpongs of ibverbs-utils, two processes on one address.
func TestPingpong(t *testing.T) {
	program(t, "ibv_rc_pingpong", "ibverbs-utils")
	for _, c := range []struct {
		args  string
		short bool
	}{
		{"rc", true}, {"uc", true}, {"ud", true}, {"srq", true}, {"xsrq", true},
		{"rc -e", true}, {"uc -e", false}, {"ud -e", true}, {"srq -e", false}, {"xsrq -e", false},
		{"rc -c -s 100000", true}, {"rc -o", true}, {"rc -O", false}, {"rc -o -P", false}, {"xsrq -o", false},
		{"rc -N", true}, {"rc -t", true}, {"rc -t -e", true}, {"rc -j", true}, {"rc -N -j -e", false}, {"rc -N -t -O -c", false},
	} {
		if !c.short && !full {
			continue
		}
		t.Run(c.args, func(t *testing.T) {
			kind, flags, _ := strings.Cut(c.args, " ")
			args := append([]string{"ibv_" + kind + "_pingpong", "-g", "0", "-n", "200"}, strings.Fields(flags)...)
			_, out := between(t, args, "VERBENA_ADDR="+address())
			if !strings.Contains(out, "200 iters in") && !strings.HasSuffix(out, "success\n") {
				t.Errorf("the client says\n%s", out)
			}
		})
	}
}

// UCX, over reliable connections and datagrams.
func TestUCX(t *testing.T) {
	program(t, "ucx_perftest", "ucx-utils")
	env := []string{"VERBENA_ADDR=" + address()}
	out := run(t, side{args: []string{"ucx_info", "-d"}, env: env})
	for _, want := range []string{"Transport: rc_verbs", "Transport: ud_verbs", "Device: verbena0:1"} {
		if !strings.Contains(out, want) {
			t.Fatalf("ucx_info does not show %q:\n%s", want, out)
		}
	}
	for _, c := range []struct {
		tls, args string
		short     bool
	}{
		{"rc_verbs,ud_verbs:aux", "-t tag_bw -s 65536", true}, {"rc_verbs,ud_verbs:aux", "-t tag_lat", false},
		{"rc_verbs,ud_verbs:aux", "-t ucp_put_bw -s 100000", false}, {"rc_verbs,ud_verbs:aux", "-t ucp_get -s 100000", false},
		{"rc_verbs,ud_verbs:aux", "-t ucp_fadd", true}, {"ud_verbs", "-t tag_lat -s 1000", true}, {"ud_verbs", "-t stream_bw", false},
		{"rc_verbs,ud_verbs:aux", "-t tag_lat -E sleep -n 5000", true}, {"ud_verbs", "-t tag_lat -E sleep", false},
		{"rc_verbs", "-t fadd -x rc_verbs -d verbena0:1", true}, // the device's atomics, not UCX's by messages
	} {
		if !c.short && !full {
			continue
		}
		t.Run(c.tls+" "+c.args, func(t *testing.T) {
			tcp := port()
			env := append([]string{"UCX_TLS=" + c.tls, "UCX_NET_DEVICES=verbena0:1"}, env...)
			args := append([]string{"ucx_perftest", "-p", tcp, "-n", "200", "-w", "10"}, strings.Fields(c.args)...)
			_, out := pair(t, side{args: args[:3], env: env}, side{args: append(args, "localhost"), env: env}, tcp)
			if !strings.Contains(out, "Final:") {
				t.Errorf("the client says\n%s", out)
			}
		})
	}
}

// perftest: every operation, and the options that change how it does it. Its output shows
// whether it has obeyed the option. On a device that it does not know it uses neither inline
// data nor ibv_wr_*, so for these cases the device is an mlx5.
func TestPerftest(t *testing.T) {
	program(t, "ib_write_bw", "perftest")
	const anyone, mlx5 = "", "mlx5"
	const plain, srq, events, newPost, inline = "", `Using SRQ +: ON`, `Test with events`, `ibv_wr\* API +: ON`, `ibv_wr\* API +: ON(?s:.*)Max inline data : 64\[B\]`
	for _, c := range []struct {
		args  string
		id    string // VERBENA_IDENTITY
		says  string
		short bool
	}{
		{"ib_write_bw", anyone, plain, true}, {"ib_write_lat", anyone, plain, true}, {"ib_read_bw", anyone, plain, true}, {"ib_read_lat", anyone, plain, true},
		{"ib_send_bw", anyone, plain, true}, {"ib_send_lat", anyone, plain, true}, {"ib_atomic_bw", anyone, plain, true}, {"ib_atomic_lat -A FETCH_AND_ADD", anyone, plain, true},
		{"ib_send_bw -c UD", anyone, plain, true}, {"ib_send_lat -c UD", anyone, plain, false}, {"ib_send_bw -c UC", anyone, plain, true},
		{"ib_send_bw -c UD -s 2048 -n 5000", anyone, plain, true},
		{"ib_send_bw -c UC -s 1048576", anyone, plain, false}, {"ib_send_lat -c UC", anyone, plain, false},
		{"ib_write_bw -c UC", anyone, plain, false}, {"ib_write_lat -c UC", anyone, plain, false}, {"ib_send_bw -c XRC", anyone, srq, true}, {"ib_write_bw -c XRC", anyone, plain, false},
		{"ib_read_bw -c XRC", anyone, plain, false}, {"ib_send_lat -c XRC", anyone, srq, false},
		{"ib_send_bw -r 64 --use-srq", anyone, srq, true}, {"ib_send_lat --use-srq", anyone, srq, false},
		{"ib_write_bw -a", anyone, plain, false}, {"ib_send_bw -a", anyone, plain, false}, {"ib_read_lat -a", anyone, plain, false},
		{"ib_write_bw -b", anyone, `Bidirectional`, true}, {"ib_send_bw -b", anyone, `Bidirectional`, false}, {"ib_read_bw -b", anyone, `Bidirectional`, false},
		{"ib_write_bw -q 8", anyone, `Number of qps +: 8`, true}, {"ib_read_bw -q 8", anyone, `Number of qps +: 8`, false}, {"ib_send_bw -q 8", anyone, `Number of qps +: 8`, false},
		{"ib_send_lat -e", anyone, events, true}, {"ib_send_bw -e", anyone, events, true}, {"ib_read_lat -e", anyone, plain, false},
		{"ib_write_bw --odp", anyone, plain, true}, {"ib_read_bw --odp", anyone, plain, false}, {"ib_send_bw --odp", anyone, plain, false},
		{"ib_write_lat -I 64 -s 64", mlx5, inline, true}, {"ib_send_lat -I 64 -s 64", mlx5, inline, true}, {"ib_send_lat -I 64 -s 64 -c UD", mlx5, inline, false},
		{"ib_write_bw -I 64 -s 32 -l 8", mlx5, inline, false}, {"ib_write_lat -I 64 -s 64 --use_old_post_send", mlx5, `Max inline data : 64\[B\]`, false},
		{"ib_write_bw", mlx5, newPost, true}, {"ib_read_bw", mlx5, newPost, false}, {"ib_send_bw -c UD", mlx5, newPost, false}, {"ib_send_bw -c XRC", mlx5, newPost, false},
		{"ib_atomic_bw", mlx5, newPost, false}, {"ib_write_bw -q 8 -b", mlx5, newPost, false}, {"ib_write_bw --use_old_post_send", mlx5, `ibv_wr\* API +: OFF`, false},
		{"ib_write_bw -m 4096 -s 1048576", anyone, plain, false},
	} {
		if !c.short && !full {
			continue
		}
		t.Run(strings.TrimSpace(c.args+" "+c.id), func(t *testing.T) {
			args := strings.Fields(c.args)
			args = slices.Insert(args, 1, "-F", "-n", "200") // an -n in c.args comes later, and counts
			_, out := between(t, args, "VERBENA_ADDR="+address(), "VERBENA_IDENTITY="+c.id)
			if !strings.Contains(out, "#bytes") || !regexp.MustCompile(c.says).MatchString(out) {
				t.Errorf("the client says\n%s\nwant %q", out, c.says)
			}
		})
	}
}
