package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
)

// version is set when a release is built: -ldflags "-X main.version=v1.2.3".
var version string

type versionCmd struct{}

func (versionCmd) Run(context.Context) error {
	fmt.Println(versionLine())
	return nil
}

// versionLine returns what this program was built from: the release, or the module
// version, and the revision of the checkout.
func versionLine() string {
	v, revision, dirty := version, "", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		if v == "" && info.Main.Version != "" && info.Main.Version != "(devel)" {
			v = info.Main.Version
		}
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision" && len(s.Value) >= 12:
				revision = " " + s.Value[:12]
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = " modified"
			}
		}
	}
	if v == "" {
		v = "development version"
	}
	return fmt.Sprintf("verbena %s%s%s %s %s/%s", v, revision, dirty, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
