package main

import (
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// The table of cases. A name has the parts
//
//	transport / operation or subject / details / family / who initiates
//
// as in rc/write/4194304/mtu4096/v4/we. The functions here return rows; they are in the
// files cases_*.go, by subject.
func table() (all []*testCase) {
	for _, rows := range [][]*testCase{
		operations(),
		atomics(),
		onDemand(),
		dmaBufs(), bufferFences(), packageTests(),
		publications(),
		shapes(),
		lateReceivers(),
		violations(),
		windows(),
		indirectKeys(),
		deaths(),
		crowds(),
		losses(),
		unreliable(),
		datagrams(),
		programs(),
		connectionsInGo(),
		refusals(),
		connections(), libfabric(), // after those: its last cases kill programs, and for seconds the watcher repeats DREQs for them
		giants(),
		peerMemory(),
	} {
		all = append(all, rows...)
	}
	return all
}

var (
	bothFamilies = []string{"v4", "v6"}
	bothWays     = []string{"we", "kernel"}
	allMTUs      = []verbs.MTU{verbs.MTU256, verbs.MTU512, verbs.MTU1024, verbs.MTU2048, verbs.MTU4096}
)

// everyWay makes a row for each family and each initiator.
func everyWay(c testCase, run func(*scene) error) (rows []*testCase) {
	for _, family := range bothFamilies {
		for _, way := range bothWays {
			row := c
			row.name = fmt.Sprintf("%s/%s/%s", c.name, family, way)
			row.family, row.run = family, run
			row.short = c.short || c.shortV4 && family == "v4"
			rows = append(rows, &row)
		}
	}
	return rows
}
