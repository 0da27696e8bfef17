package host

// XRC domains that files name, which any process of the device may open. Each process writes
// those that it has open to its entry of the directory, where the others see them.

// MaxDomains is how many named domains a process has open at most.
const MaxDomains = 128

// Domain is the name of a domain: which file it is, by device and inode.
type Domain [2]uint64

// AddDomain enters a domain that this process has open in the directory. It reports false if there
// is no room. Of two processes that add the same domain and then call DomainElsewhere, at
// least one sees the other.
func (m *Member) AddDomain(d Domain) bool {
	own := &m.dir.process[m.Slot()]
	for i := range own.domains {
		if e := &own.domains[i]; e.used.Load() == 0 {
			e.name[0].Store(d[0])
			e.name[1].Store(d[1])
			e.used.Store(1)
			return true
		}
	}
	return false
}

// DropDomain undoes AddDomain.
func (m *Member) DropDomain(d Domain) {
	own := &m.dir.process[m.Slot()]
	for i := range own.domains {
		if e := &own.domains[i]; e.is(d) {
			e.used.Store(0)
			return
		}
	}
}

// DomainElsewhere reports whether another process has a domain open.
func (m *Member) DomainElsewhere(d Domain) bool { return len(m.DomainHolders(d)) > 0 }

// DomainHolders returns the other processes that have a domain open.
func (m *Member) DomainHolders(d Domain) (processes []int) {
	for i := range m.dir.process {
		p := &m.dir.process[i]
		id := m.dir.who(i)
		if i == m.Slot() || id == 0 {
			continue
		}
		for k := range p.domains {
			if p.domains[k].is(d) {
				if m.dir.alive(id) {
					processes = append(processes, i)
				}
				break
			}
		}
	}
	return processes
}

func (e *domainEntry) is(d Domain) bool {
	return e.used.Load() != 0 && e.name[0].Load() == d[0] && e.name[1].Load() == d[1]
}
