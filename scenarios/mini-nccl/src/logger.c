/* The logger that mini-nccl passes to a plugin. It formats the line here because stable Rust cannot define a
 * variadic function. */
#include <stdarg.h>
#include <stdio.h>

void mini_nccl_log_line(int level, unsigned long flags, const char *file, int line, const char *text);

void mini_nccl_logger(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
  char text[2048];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format ? format : "(null format)", args);
  va_end(args);
  mini_nccl_log_line(level, flags, file, line, text);
}
