// Package drivertest exercises an NVMe controller through package driver. It does not know which one it is, so the model
// of package nvme/pci and a controller that others have made can be held to each other:
//
//   - [Data] moves data in all the ways that the driver has, and looks whether it arrives.
//   - [Outcomes] executes commands that are right, wrong and strange, and returns how each ended.
package drivertest
