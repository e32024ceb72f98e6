"""Problems with right programs and mutants, and programs that attack their judge."""
