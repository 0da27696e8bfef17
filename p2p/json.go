package p2p

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// mostJSON is how long a file may be: a machine has at most some thousand functions.
const mostJSON = 64 << 20

// ParseJSON reads a machine from a JSON object, whose fields are those of [Spec]. Fields that there
// are not are an error.
func ParseJSON(b []byte) (*Topology, error) {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var s Spec
	if err := dec.Decode(&s); err != nil {
		return nil, refuse("JSON: %v", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, refuse("JSON: something follows the object")
	}
	return New(s)
}

// MarshalJSON writes what ParseJSON reads.
func (t *Topology) MarshalJSON() ([]byte, error) { return json.Marshal(t.spec) }

// Read reads a machine: a directory with a dump ([ReadSys]), or a file with JSON ([ParseJSON]).
func Read(path string) (*Topology, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return ReadSys(path)
	}
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, mostJSON+1))
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return nil, err
	}
	if len(b) > mostJSON {
		return nil, refuse("%s: more than %d bytes", path, mostJSON)
	}
	t, err := ParseJSON(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}
