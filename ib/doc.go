// Package ib holds the nouns and numbers of InfiniBand verbs that every part of
// Verbena shares: access rights, work requests, completions, queue pair
// attributes, addresses, limits and errors.
//
// Programs usually import package verbs alone, which re-exports all that programs
// need under the same names. The package only formats, parses and adds up values. It
// imports nothing of Verbena.
//
// Most enumerations start at 1, so that a field that was forgotten is refused
// rather than taken for the first value. The exceptions are [LockMode] and [DMClass],
// whose zero values are defaults, and [WCStatus] and [Advice], which have the numbers
// of their C counterparts, as [MTU] and [MWType] have. Of the bit sets, [Access],
// [FlushType] and [ODPTransportCaps] have the bits of their C counterparts; the others
// share the names alone.
package ib
