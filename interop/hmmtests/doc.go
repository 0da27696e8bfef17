// Package hmmtests runs Linux's own selftests of HMM on the engine of package hmm.
//
// The tests are tools/testing/selftests/mm/hmm-tests.c, of Debian's newest package of the kernel's source: 76 cases, which
// speak to a driver of the kernel's, lib/test_hmm.c, by /dev/hmm_dmirror0 to 3. A library that is preloaded (testdata) answers
// instead of it. Which cases pass, and why the others do not, is in docs/hmm-tests.md.
//
//   - source.go fetches the source, and builds the tests and the library.
//   - run.go runs cases.
//   - table.go reads and writes the table of the document.
package hmmtests
