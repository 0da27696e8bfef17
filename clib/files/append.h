#ifndef VERBENA_APPEND_H
#define VERBENA_APPEND_H

/* vb_open_appended returns a descriptor, for reading, of what is left of a file, and of the lines of a
 * text that the file does not have; -1 with errno if it cannot. from is -1 if there is no file. flags
 * are those of open. */
int vb_open_appended(int from, const char *text, int flags);

#endif
