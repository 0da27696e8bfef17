package main

import (
	"errors"
	"time"

	"github.com/alecthomas/kong"
)

// optFlag is a flag that may have a value: --listen or --listen=ADDR.
type optFlag struct {
	on    bool
	value string
}

// Decode implements kong.MapperValue.
func (f *optFlag) Decode(ctx *kong.DecodeContext) error {
	f.on = true
	if ctx.Scan.Peek().Type == kong.FlagValueToken {
		f.value = ctx.Scan.Pop().String()
		if f.value == "" {
			return errors.New("want a value after =")
		}
	}
	return nil
}

// IsBool implements kong.BoolMapperValue: the value may be left out.
func (f *optFlag) IsBool() bool { return true }

// watchFlag is the interval of --watch, --watch=2s or --watch 2s. Zero: the flag is not
// given.
type watchFlag time.Duration

// Decode implements kong.MapperValue. What follows the flag is its value if it is
// a duration: no device has such a name.
func (f *watchFlag) Decode(ctx *kong.DecodeContext) error {
	*f = watchFlag(time.Second)
	next := ctx.Scan.Peek()
	d, err := time.ParseDuration(next.String())
	if err == nil && (next.Type == kong.UntypedToken || next.IsValue()) {
		ctx.Scan.Pop()
		*f = watchFlag(d)
		if d < minWatch {
			return errors.New("want at least 10ms")
		}
		return nil
	}
	if next.Type == kong.FlagValueToken {
		ctx.Scan.Pop()
		return errors.New("want a time such as 500ms or 2s")
	}
	return nil
}

// minWatch is the shortest interval: the processes that are watched should not spend
// their time on answering.
const minWatch = 10 * time.Millisecond

// IsBool implements kong.BoolMapperValue: the value may be left out.
func (f *watchFlag) IsBool() bool { return true }
