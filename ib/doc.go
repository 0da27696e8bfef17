// Package ib holds the nouns and numbers of InfiniBand verbs that every part of
// Verbena shares: access rights, work requests, completions, queue pair
// attributes, addresses, limits and errors.
//
// Programs usually import package verbs alone, which re-exports everything here
// under the same names. The package has no behaviour beyond formatting and
// validation, starts nothing and imports nothing of Verbena.
//
// Enumerations start at 1, so that a field somebody forgot to set is refused
// rather than taken for the first value; [WCStatus] is the exception, it keeps
// the numbers of ibv_wc_status because people read them in logs.
package ib
