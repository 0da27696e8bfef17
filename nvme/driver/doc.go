// Package driver drives an NVMe controller from user space: a real one, or the model of package nvme/pci. All that it
// knows of the controller is its registers, memory that both reach, and, for a controller memory buffer, the BAR that
// has it.
//
//	regs, dma := …                              // a BAR and its IOMMU, or a model and its bus
//	c, err := driver.Open(regs, dma, nil)
//	list, err := c.Namespaces(ctx)
//	q, err := c.NewQueue(ctx, driver.QueueConfig{})
//	err = q.Write(ctx, list[0], 0, data)        // data is a Memory: of dma, of c.CMB(), or a peer's
//	err = c.Close()
//
// Completions are polled, by the goroutines that wait for them: the package starts none. Queues may be used by many
// goroutines at a time.
//
// # Memory
//
// A [Memory] that a command uses belongs to the controller until the command has completed, or until Reset or Close has
// stopped the controller: then the command's Wait returns ErrReset or ErrClosed. A command that was given up, since its
// context ended or with ErrTimeout, ErrFatal or ErrBroken, is still under way. A [Storage] sees to that itself.
package driver
