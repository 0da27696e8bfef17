package main

func victim([]string) error { return nil }
