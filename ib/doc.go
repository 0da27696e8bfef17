// Package ib holds the nouns and numbers of InfiniBand verbs that every part of
// Verbena shares: access rights, work requests, completions, queue pair
// attributes, addresses, limits and errors.
//
// Programs usually import package verbs alone, which re-exports everything here
// under the same names. The package has no behaviour beyond formatting and
// validation, starts nothing and imports nothing of Verbena.
//
// Enumerations start at 1, so that a field somebody forgot to set is refused
// rather than taken for the first value. There are two exceptions: [WCStatus]
// keeps the numbers of ibv_wc_status, because people read them in logs, and the
// zero [LockMode] is the default. Of the bit sets only [Access] has the numbers
// of its C counterpart; the others share the names alone.
package ib
