// This file is empty on purpose: a package with an assembly file may declare
// functions whose bodies are elsewhere.
