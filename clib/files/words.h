/*
 * Words of a setting, separated by commas.
 */
#ifndef VERBENA_WORDS_H
#define VERBENA_WORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

/* vb_has_word reports whether a list has a word. The list may be NULL. */
static inline bool vb_has_word(const char *list, const char *word)
{
	size_t n = strlen(word);
	while (list && *list) {
		list += strspn(list, ", ");
		size_t len = strcspn(list, ",");
		while (len && list[len - 1] == ' ')
			len--;
		if (len == n && !strncmp(list, word, n))
			return true;
		list += strcspn(list, ",");
	}
	return false;
}

#endif
