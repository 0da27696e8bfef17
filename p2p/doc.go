// Package p2p decides which devices of a machine can move data between each other without system
// memory, by the rules of Linux's P2PDMA, and models the three parties that do it.
//
// # The topology
//
// A [Topology] is what the rules look at: host bridges, root ports, switches and endpoints with
// their ACS bits, BARs and bridge windows, the CPU and the IOMMU. It is made by [New] from a
// [Spec], which is plain data and comes from one of:
//
//   - a [Builder], in code,
//   - [ParseJSON], from a file,
//   - [ReadSys], from /sys of this machine or from a dump of another one's.
//
// New refuses what no machine can be: see [Spec.Check]. [Topology.Dump] writes the files that
// ReadSys reads.
//
// # The verdict
//
// [Topology.Verdict] returns for a provider and a client the map type and the distance that the
// kernel computes, and why: which bridge or host bridge decided. [Topology.DistanceMany] and
// [Topology.FindMany] are the kernel's functions of those names.
//
// # The three roles
//
//   - A [Provider] has memory in a BAR, or a dma-buf of a device, and allocates ranges of it.
//   - A [Client] is a device that maps lists of segments. It tells peer memory from system memory,
//     and gets a bus address, an address through the host bridge, or a refusal.
//   - An [Orchestrator] chooses the provider for a set of clients, allocates, and drives transfers.
//     It falls back to system memory only if it was told to, and counts it.
//
// [Places] says at which address of the topology a device of package verbs or gpu sits, and makes
// the Distance function of a software GPU from it.
package p2p
