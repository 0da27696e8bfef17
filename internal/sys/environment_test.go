package sys

import "testing"

// Once variables were set, they alone count. The first of two with the same name counts.
func TestEnvironment(t *testing.T) {
	t.Setenv("VERBENA_TEST_A", "of the process")
	if got := Getenv("VERBENA_TEST_A"); got != "of the process" {
		t.Errorf("the process's variable is %q", got)
	}
	defer ResetEnvironment()
	SetEnvironment([]string{"VERBENA_TEST_B=1", "VERBENA_TEST_C=a=b", "VERBENA_TEST_B=2", "VERBENA_TEST_D="})
	for name, want := range map[string]string{"VERBENA_TEST_A": "", "VERBENA_TEST_B": "1", "VERBENA_TEST_C": "a=b", "VERBENA_TEST_D": ""} {
		if got := Getenv(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
}
