// Package hmm runs Linux's own selftests of HMM on the engine of package hmm.
package hmm
