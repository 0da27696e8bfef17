/*
 * The settings are variables of the environment. A program may change them until its first
 * verb. But programs that change their title, as many servers do, write over the environment
 * that they were started with, which is also where the Go runtime would look. So the
 * variables are copied when this library is loaded, and the copy counts for what the
 * environment does not have any more.
 *
 * A list of variables is one block of strings NAME=VALUE. An empty string ends it.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../files/words.h"
#include "front.h"

static char *loaded; /* the list when this library was loaded; NULL if memory was short */

/* is_setting reports whether the library reads a variable. */
static bool is_setting(const char *var)
{
	return !strncmp(var, "VERBENA_", 8) || !strncmp(var, "MLX5_SCATTER_TO_CQE=", 20);
}

/* list_size returns the length of a list without its end. */
static size_t list_size(const char *list)
{
	size_t n = 0;
	while (list && list[n])
		n += strlen(list + n) + 1;
	return n;
}

char *vb_settings(void)
{
	size_t size = list_size(loaded) + 1;
	for (char **e = environ; e && *e; e++)
		if (is_setting(*e))
			size += strlen(*e) + 1;
	char *list = calloc(1, size), *to = list;
	if (!list)
		return NULL;
	for (char **e = environ; e && *e; e++)
		if (is_setting(*e))
			to = stpcpy(to, *e) + 1;
	if (loaded)
		memcpy(to, loaded, list_size(loaded));
	return list;
}

__attribute__((constructor)) static void at_load(void) { loaded = vb_settings(); }

const char *vb_setting(const char *name)
{
	const char *now = getenv(name);
	size_t n = strlen(name);
	if (now)
		return now;
	for (const char *s = loaded; s && *s; s += strlen(s) + 1)
		if (!strncmp(s, name, n) && s[n] == '=')
			return s + n + 1;
	return NULL;
}

bool vb_hides(const char *word) { return vb_has_word(vb_setting("VERBENA_HIDE"), word); }
