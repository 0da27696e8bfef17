// Package p2p holds the verdicts of package p2p to those of the Linux kernel. A machine is generated
// as arguments of the emulator: root ports, switches in switches, a second host bridge, NVMe
// controllers with and without memory. In the guest (package guest) the kernel is asked for every
// provider and client, in two ways; the machine's /sys is dumped. The host reads the dump and compares.
package p2p
