package main

// Threads that post at the same time, compared with one. Each has its own queue pairs, its
// own completion queue and its own memory.

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

const (
	postingThreads = 8
	qpsOfThread    = 2
	enoughCores    = 16  // for the threads, and as many for what serves them
	notSlowerGoal  = 0.9 // with fewer cores
)

// threadGoal returns the goal of many threads, compared with one, and why it is this one.
// Threads can only be faster than one if there are cores for them.
func threadGoal(cores int, full float64) (*goal, string) {
	if cores >= enoughCores {
		return &goal{"≥", full}, fmt.Sprintf("goal ≥ %v: %d cores, at least %d", full, cores, enoughCores)
	}
	return &goal{"≥", notSlowerGoal},
		fmt.Sprintf("goal ≥ %v, nothing gets slower: %d cores, fewer than the %d that the goal ≥ %v needs", notSlowerGoal, cores, enoughCores, full)
}

// manyThreads compares many threads with one: messages of 8 bytes within a process, of
// 64 KiB between two.
func (b *bench) manyThreads(newRig func(spec) (*rig, error), link verbs.LinkMode, full float64) ([]contender, error) {
	// As in the groups that have one thread: rate, udp-bw-64k, local-bw-64k.
	size, list, depth, unit := 64<<10, 1, 32, "GB/s"
	if link == verbs.LinkLoop {
		size, list, depth, unit = 8, 32, 4, "million/s"
	}
	sp := spec{Link: link, Type: verbs.RC, QPs: 1, Size: size, Slots: list, Sends: list * depth}
	one, err := newRig(sp)
	if err != nil {
		return nil, err
	}
	sp.Threads, sp.QPs = postingThreads, qpsOfThread
	many, err := newRig(sp)
	if err != nil {
		return nil, err
	}
	const ref = "1 queue pair, 1 thread"
	var g *goal
	g, b.note = threadGoal(runtime.NumCPU(), full)
	cs := []contender{
		one.threaded(row{name: ref, unit: unit}, list, depth),
		many.threaded(row{fmt.Sprintf("%d queue pairs, %d threads", postingThreads*qpsOfThread, postingThreads), unit, ref, g}, list, depth),
	}
	if unit != "GB/s" {
		for i := range cs {
			cs[i] = cs[i].inMessages(size)
		}
	}
	return cs, nil
}

// threaded is a contender whose threads keep WRITEs under way: depth lists on each queue
// pair. The rate is the sum of the threads' rates, from their common start on.
func (r *rig) threaded(rw row, list, depth int) contender {
	var pumps []*pump
	for _, s := range r.near.threads() {
		p := newPump(s, verbs.OpRDMAWrite, list, depth*len(s.qps), whoComplete)
		p.crowded = r.near.Threads >= runtime.GOMAXPROCS(0)
		pumps = append(pumps, p)
	}
	return contender{rows: []row{rw}, side: r.near, rates: func(d time.Duration) ([]rate, error) {
		if err := r.serve(modePassive, true); err != nil {
			return nil, err
		}
		done, err := pumpAll(pumps, d)
		used, stopErr := r.finish()
		if err := errors.Join(err, stopErr); err != nil {
			return nil, err
		}
		var perSecond float64
		var lists int
		for _, one := range done {
			perSecond += float64(one.lists) / one.elapsed.Seconds()
			lists += one.lists + one.late
		}
		gb := float64(list) * float64(r.near.Size) / 1e9
		return []rate{{perSecond * gb, used.Seconds() / (float64(lists) * gb)}}, nil
	}}
}

// pumpAll runs pumps at the same time and waits for all of them, which takes little more
// than d even if one fails.
func pumpAll(pumps []*pump, d time.Duration) ([]pumped, error) {
	done, errs := make([]pumped, len(pumps)), make([]error, len(pumps))
	start := time.Now()
	var running sync.WaitGroup
	for i, p := range pumps {
		running.Go(func() { done[i], errs[i] = p.run(start, d) })
	}
	running.Wait()
	return done, errors.Join(errs...)
}
