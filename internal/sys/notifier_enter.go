package sys

// Enter and Leave: see the notifier.
func (n *Notifier) Enter(uint32) bool { return !n.Changed() }
func (n *Notifier) Leave(uint32)      {}
