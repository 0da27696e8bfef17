package store

import (
	"errors"
	"fmt"
	"os"
)

// Table is the memory of a server: what clients READ. Its methods are for one goroutine at a time; READs of clients may come at
// any moment.
type Table struct {
	memory  []byte
	buckets int
	file    *os.File // has the same bytes as memory; nil: the table ends with the process
	version uint64   // of the last change
}

// MaxBuckets is how many buckets a table may have.
const MaxBuckets = 1 << 20

// NewTable makes an empty table in memory.
func NewTable(buckets int) (*Table, error) {
	if buckets < 1 || buckets > MaxBuckets {
		return nil, fmt.Errorf("a table of %d buckets: from 1 to %d are possible", buckets, MaxBuckets)
	}
	t := &Table{memory: make([]byte, buckets*bucketSize), buckets: buckets}
	free := (&entry{}).encode()
	for at := 0; at < len(t.memory); at += slotSize {
		copy(t.memory[at:], free[:])
	}
	return t, nil
}

// OpenTable makes a table that is also in a file, and takes from there what an earlier process has left. Only one process may
// have the file open; nothing here enforces it.
func OpenTable(path string, buckets int) (t *Table, err error) {
	if t, err = NewTable(buckets); err != nil {
		return nil, err
	}
	if t.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := t.load(path); err != nil {
		return nil, errors.Join(err, t.file.Close())
	}
	return t, nil
}

// load fills a new file, or takes what is in an old one. Versions go on from the highest that is there. A process that was killed
// while it filled the file has left a beginning of it, which holds nothing: it is filled again.
func (t *Table) load(path string) error {
	info, err := t.file.Stat()
	if err != nil {
		return err
	}
	size := int64(len(t.memory))
	if info.Size() < size {
		part := make([]byte, info.Size())
		if _, err := t.file.ReadAt(part, 0); err != nil && info.Size() > 0 {
			return err
		}
		if string(part) != string(t.memory[:len(part)]) {
			return fmt.Errorf("%s has %d bytes, a table of %d buckets has %d", path, info.Size(), t.buckets, size)
		}
		_, err := t.file.WriteAt(t.memory, 0)
		return err
	}
	if info.Size() > size {
		return fmt.Errorf("%s has %d bytes, a table of %d buckets has %d", path, info.Size(), t.buckets, size)
	}
	if _, err := t.file.ReadAt(t.memory, 0); err != nil {
		return err
	}
	for i := range t.buckets * slots {
		e, whole := decode(t.memory[i*slotSize:][:slotSize])
		if !whole {
			return fmt.Errorf("%s: slot %d is damaged", path, i)
		}
		t.version = max(t.version, e.version)
	}
	return nil
}

// Close closes the file.
func (t *Table) Close() error {
	if t.file == nil {
		return nil
	}
	return t.file.Close()
}

// slotOf returns the slot that has a key, and the first free one of its bucket; -1: there is none.
func (t *Table) slotOf(key string) (has, free int) {
	has, free = -1, -1
	first := bucketOf(key, t.buckets) * slots
	for i := first; i < first+slots; i++ {
		e, _ := decode(t.memory[i*slotSize:][:slotSize]) // whole: nobody else writes
		switch {
		case string(e.key) == key:
			has = i
		case len(e.key) == 0 && free < 0:
			free = i
		}
	}
	return has, free
}

// Put sets the value of a key, and returns the version.
func (t *Table) Put(key string, value []byte) (version uint64, err error) {
	if err := checkKey(key, value); err != nil {
		return 0, err
	}
	at, free := t.slotOf(key)
	if at < 0 {
		at = free
	}
	if at < 0 {
		return 0, ErrFull
	}
	return t.write(at, entry{key: []byte(key), value: value})
}

// Delete takes a key out, and returns the version of that.
func (t *Table) Delete(key string) (version uint64, err error) {
	if err := checkKey(key, nil); err != nil {
		return 0, err
	}
	at, _ := t.slotOf(key)
	if at < 0 {
		return 0, ErrNotFound
	}
	return t.write(at, entry{})
}

// write writes a slot, first into the file and then into the memory: what a client can see, the next process finds. A slot lies
// within a page of the file, and the kernel does not stop in the middle of a page, so a process that is killed here leaves the
// old slot or the new one. The copy into the memory is what a READ may see half of.
func (t *Table) write(slot int, e entry) (version uint64, err error) {
	e.version = t.version + 1
	b, at := e.encode(), slot*slotSize
	if t.file != nil {
		if _, err := t.file.WriteAt(b[:], int64(at)); err != nil {
			return 0, fmt.Errorf("%w: %w", ErrStorage, err)
		}
	}
	copy(t.memory[at:], b[:])
	t.version = e.version
	return e.version, nil
}
